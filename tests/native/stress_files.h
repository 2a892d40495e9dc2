// stress_files.h: what stress.cpp runs of stress_files.cpp.
#pragma once

void stress_files();
