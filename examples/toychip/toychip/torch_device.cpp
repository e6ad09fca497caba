// The toy chip as a torch device (PrivateUse1): allocation, views, copies, and one boxed function that runs the ops of
// aten_ops.txt on the chip. An op that is not in the list raises, as it would on a chip that has no kernel for it.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "runtime.h"

namespace {

using at::Tensor;
constexpr auto kChip = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kChip, 0);

struct ChipAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? toychip_malloc(bytes) : nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, data || !bytes, "toychip: ", bytes, " bytes do not fit into the chip's memory");
    return {data, data, &toychip_free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &toychip_free; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    if (bytes) std::memcpy(toychip_view(target), toychip_view(source), bytes);
  }
};
ChipAllocator allocator;
REGISTER_ALLOCATOR(kChip, &allocator)

struct ChipGuard final : c10::impl::NoOpDeviceGuardImpl<kChip> {
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(kDevice); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kDevice); }

  // An op has finished when its call returns, so there is nothing to wait for, and an event is a moment.
  using Moment = std::chrono::steady_clock::time_point;
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment;
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Moment*>(to) - *static_cast<Moment*>(from)).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, ChipGuard)

struct ChipHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    size_t kept = std::min(bytes, storage.nbytes());
    allocator.copy_data(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(new ChipHooks), true);

// ---------------------------------------------------------------------------------------- tensors as the chip sees them

bool on_chip(const Tensor& t) { return t.defined() && t.device().type() == kChip; }

/// The same bytes as a CPU tensor: what code on the chip works with. Without elements there are no bytes to share.
Tensor view_of(const Tensor& t) {
  auto options = t.options().device(c10::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  void* bytes = toychip_view(t.data_ptr());
  TORCH_CHECK(bytes, "toychip: a tensor does not lie in the chip's memory");
  return at::from_blob(bytes, t.sizes(), t.strides(), options);
}

Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (tensor->storage_offset() + tensor->numel()) * tensor->itemsize();
  if (bytes > tensor->storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor->storage(), bytes);
  return self;
}

/// The one way between host and chip: an explicit copy.
Tensor copy_from(const Tensor& self, const Tensor& target, bool) {
  auto source = on_chip(self) ? view_of(self) : self;
  auto destination = on_chip(target) ? view_of(target) : target;
  destination.copy_(source);
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

c10::Scalar local_scalar(const Tensor& self) { return at::_local_scalar_dense(view_of(self)); }

// ------------------------------------------------------------------------------------------------------- ops on the chip

std::unordered_set<std::string>& allowed() {
  static std::unordered_set<std::string> names;
  return names;
}

void allow(const std::vector<std::string>& names) { allowed().insert(names.begin(), names.end()); }

/// An argument for the chip. A host tensor is refused unless it is a scalar, as on any real device.
Tensor argument(const c10::OperatorHandle& op, const Tensor& t) {
  if (!t.defined()) return t;
  if (on_chip(t)) return view_of(t);
  TORCH_CHECK(t.dim() == 0, "toychip: ", op.schema().name(), " got a host tensor of shape ", t.sizes(),
              "; copy it to the chip first");
  return t;
}

c10::IValue converted(const c10::OperatorHandle& op, const c10::IValue& value) {
  if (value.isTensor()) return argument(op, value.toTensor());
  if (value.isDevice()) return c10::Device(c10::kCPU);
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(argument(op, t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
      list.push_back(t ? std::optional<Tensor>(argument(op, *t)) : std::nullopt);
    }
    return list;
  }
  return value;
}

/// Index of the argument that a result stands for (out= and in-place ops), or -1 for a new tensor.
int written_argument(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr || !alias->isWrite()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) return int(i);
  }
  return -1;
}

/// Brings back what an op wrote to a tensor that had no elements, or another size, before.
void settle(const Tensor& device, const Tensor& seen) {
  if (device.sizes() == seen.sizes()) return;
  device.resize_(seen.sizes());
  copy_from(seen, device, false);
}

Tensor uploaded(const Tensor& t) {
  if (!t.defined() || t.device().type() != c10::kCPU) return t;
  auto device = at::empty_like(t, t.options().device(kDevice));
  copy_from(t, device, false);
  return device;
}

c10::IValue uploaded_value(const c10::IValue& value) {
  if (value.isTensor()) return uploaded(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<Tensor> list;
  for (const Tensor& t : value.toTensorVector()) list.push_back(uploaded(t));
  return list;
}

void run_on_chip(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(allowed().count(schema.name()), "toychip has no kernel for ", schema.name(),
                              ": it is not in the list of ops that references may use");
  const size_t count = schema.arguments().size();
  std::vector<c10::IValue> given(stack->end() - count, stack->end()), seen;
  for (const auto& value : given) seen.push_back(converted(op, value));
  std::copy(seen.begin(), seen.end(), stack->end() - count);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && given[i].isTensor()) settle(given[i].toTensor(), seen[i].toTensor());
  }
  const size_t results = schema.returns().size();
  for (size_t r = 0; r < results; ++r) {
    auto& value = (*stack)[stack->size() - results + r];
    int target = written_argument(schema, r);
    value = target < 0 ? uploaded_value(value) : given[target];
  }
}

}  // namespace

TORCH_LIBRARY(toychip, m) { m.def("allow(str[] names) -> ()", &allow); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_chip>()); }
