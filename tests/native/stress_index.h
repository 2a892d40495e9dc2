// stress_index.h: what stress.cpp runs of stress_index.cpp.
#pragma once

void stress_index();
