// The one function of the host's library that kernel sources call.
#pragma once

#include <stddef.h>

int snprintf(char* text, size_t size, const char* format, ...) __attribute__((format(printf, 3, 4)));
