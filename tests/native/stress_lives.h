// stress_lives.h: what stress.cpp runs of stress_lives.cpp.
#pragma once

void stress_lives();
