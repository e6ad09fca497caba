// The API as the manifest declares it.
#pragma once

#include "api.h"
