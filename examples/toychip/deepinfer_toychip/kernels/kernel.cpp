#include "kernel.h"

#include <cstdio>
#include <new>

#include "../../toychip/runtime.h"

namespace toy {

Tensor Call::tensor() {
  if (next_ == count_) throw BadCall("a tensor argument is missing");
  Tensor found;
  static_cast<di_tensor&>(found) = tensors_[next_++];
  if (found.data != nullptr) {
    found.data = toychip_view(found.data);
    if (found.data == nullptr) throw BadCall("tensor " + std::to_string(next_ - 1) + " does not lie in the chip's memory");
  }
  return found;
}

int run(void (*body)(Call&), const di_tensor* t, int n, const di_params* p, di_error* e) {
  int status = DI_OK;
  const char* message = "";
  std::string kept;
  try {
    Call call(t, n, p);
    body(call);
  } catch (const BadCall& error) {
    status = DI_BAD_CALL, kept = error.what(), message = kept.c_str();
  } catch (const std::bad_alloc&) {
    status = DI_FAILED, message = "scratch memory is used up";
  } catch (const std::exception& error) {
    status = DI_FAILED, kept = error.what(), message = kept.c_str();
  }
  std::snprintf(e->message, sizeof e->message, "%s", message);
  return status;
}

}  // namespace toy
