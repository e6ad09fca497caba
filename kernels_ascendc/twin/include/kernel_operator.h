// Ascend C's header name: includes everything that the twin models.
#pragma once

#include "twin/copy.h"
#include "twin/cube.h"
#include "twin/peer.h"
#include "twin/pipe.h"
#include "twin/reduce.h"
#include "twin/reg.h"
#include "twin/select.h"
#include "twin/sync.h"
#include "twin/tensor.h"
#include "twin/vector.h"
