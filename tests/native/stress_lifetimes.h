// stress_lifetimes.h: what stress.cpp runs of stress_lifetimes.cpp.
#pragma once

void stress_lifetimes();
