// stress_what_if.h: what stress.cpp runs of stress_what_if.cpp.
#pragma once

void stress_what_if();
