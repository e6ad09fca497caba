// Ascend C's header name: includes everything that the twin models.
#pragma once

#include "twin/copy.h"
#include "twin/pipe.h"
#include "twin/reduce.h"
#include "twin/tensor.h"
#include "twin/vector.h"
