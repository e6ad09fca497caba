// Flags between cores, and the barrier of all cores.
#pragma once

#include "twin/pipe.h"

namespace AscendC {

struct SyncAllConfig {
  pipe_t triggerPipe = PIPE_ALL, waitPipe = PIPE_ALL;
};
inline constexpr SyncAllConfig DEFAULT_SYNC_ALL_CONFIG = {PIPE_ALL, PIPE_ALL};

}  // namespace AscendC

namespace twin {

void cross_set(int mode, int pipe, uint16_t id, Where where);
void cross_wait(int mode, int pipe, uint16_t id, Where where);
void sync_all(bool vectors_only, int trigger, int wait, Where where);

}  // namespace twin

namespace AscendC {

// Modes: 0 all cube cores or all vector cores; 1 the two vector cores of a core; 2 the cube core and both vector cores;
// 4 the cube core and one vector core (the cube core's ids 16 and up belong to the second).
template <uint8_t modeId, pipe_t pipe> inline void CrossCoreSetFlag(uint16_t flagId, TWIN_HERE) {
  twin::cross_set(modeId, (int)pipe, flagId, where);
}
template <uint8_t modeId = 0, pipe_t pipe = PIPE_S> inline void CrossCoreWaitFlag(uint16_t flagId, TWIN_HERE) {
  twin::cross_wait(modeId, (int)pipe, flagId, where);
}
// A vector kernel that uses SyncAll is a __mix__(0, 1) kernel on the device, not a __vector__ one.
template <bool isAIVOnly = true, const SyncAllConfig& config = DEFAULT_SYNC_ALL_CONFIG> inline void SyncAll(TWIN_HERE) {
  twin::sync_all(isAIVOnly, (int)config.triggerPipe, (int)config.waitPipe, where);
}

}  // namespace AscendC
