// A stand-in for a vendor's device: torch's PrivateUse1 on host memory, with the CPU's kernels, and
// a collective backend for it that hands the same memory to another backend (gloo). For tests.
// The memory is mapped twice. A tensor's address is in a mapping that nobody may touch, and only
// kernels and the backend know the other one: code of the host that uses the address dies.
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include "stream.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
constexpr auto kType = DeviceType::PrivateUse1;
constexpr DeviceIndex kCount = 8;

thread_local DeviceIndex current = 0;

// ---- memory ----

// One file, whose pages come into being when they are written. A block's size is a power of two;
// freed blocks are used again and never given back.
struct Arena {
  static constexpr size_t kBytes = size_t(1) << 36, kSmallest = 64;
  std::mutex mutex;
  char *shown, *used, *next;
  std::unordered_map<void*, size_t> sizes;
  std::unordered_map<size_t, std::vector<void*>> freed;

  Arena() {
    int file = memfd_create("standin", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && !ftruncate(file, kBytes), "the stand-in gets no memory");
    next = shown = map(file, PROT_NONE);
    used = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }
  static char* map(int file, int access) {
    void* data = mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(data != MAP_FAILED, "the stand-in gets no memory");
    madvise(data, kBytes, MADV_DONTFORK);  // as a device's, it is of one process
    return static_cast<char*>(data);
  }
  void* take(size_t bytes) {
    size_t size = kSmallest;
    while (size < bytes) size *= 2;
    std::lock_guard<std::mutex> lock(mutex);
    auto& free = freed[size];
    if (free.empty()) {
      TORCH_CHECK_WITH(OutOfMemoryError, size <= size_t(shown + kBytes - next), "it is full");
      free.push_back(next);
      next += size;
    }
    void* data = free.back();
    free.pop_back();
    sizes[data] = size;
    return data;
  }
  void give_back(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = sizes.find(data);
    freed[found->second].push_back(data);
    sizes.erase(found);
  }
};
Arena& arena = *new Arena;  // tensors may outlive the library's own objects

}  // namespace

// Where kernels and the backend find what a tensor's address stands for.
void* kernels_address(const void* data) {
  if (!data) return nullptr;
  size_t place = static_cast<const char*>(data) - arena.shown;
  TORCH_CHECK(place < Arena::kBytes, "a tensor on the stand-in has memory of the host");
  return arena.used + place;
}

namespace {

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? arena.take(bytes) : nullptr;
    return {data, data, &release, Device(kType, current)};
  }
  static void release(void* data) {
    if (data) arena.give_back(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    if (bytes) default_copy_data(kernels_address(to), kernels_address(from), bytes);
  }
};
Allocator allocator;

// The host's memory that a device could read by itself.
struct Pinned final : c10::Allocator {
  static inline auto& mutex = *new std::mutex;
  static inline auto& ends = *new std::map<const void*, const void*>;

  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetAllocator(c10::kCPU)->raw_allocate(std::max(bytes, Arena::kSmallest));
    std::lock_guard<std::mutex> lock(mutex);
    ends[data] = static_cast<char*>(data) + std::max<size_t>(bytes, 1);
    return {data, data, &release, Device(c10::kCPU)};
  }
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    ends.erase(data);
    c10::GetAllocator(c10::kCPU)->raw_deallocate(data);
  }
  static bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = ends.upper_bound(data);
    return after != ends.begin() && data < std::prev(after)->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
Pinned pinned;

// ---- which device; there is one stream, and everything but deferred calls is done at once ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    uncheckedSetDevice(d);
    return old;
  }
  Device getDevice() const override { return {kType, current}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kCount, "this stand-in has ", int(kCount), " devices");
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  Stream getStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return Stream(Stream::DEFAULT, d); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream s) const override { return s; }
  DeviceIndex deviceCount() const noexcept override { return kCount; }
  // An event is the number of calls that were in the stream when it was recorded.
  void record(void** event, const Stream&, const DeviceIndex,
              const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(CallStream::get().last());
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override {
    return CallStream::get().done(reinterpret_cast<uint64_t>(event));
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kCount; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = current;
    current = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* data) const override { return Pinned::holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    allocator.copy_data(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};
Hooks hooks;

// ---- operations: memory and views here, all else by the CPU's ----

// The same memory as a CPU tensor.
Tensor on_host(const Tensor& data) {
  if (!data.is_privateuseone()) return data;
  Tensor keep = data.detach();
  Tensor host = at::from_blob(kernels_address(data.data_ptr()), data.sizes(), data.strides(),
                              [keep](void*) {},
                              data.options().device(at::kCPU).requires_grad(false));
  host._set_conj(data.is_conj());
  host._set_neg(data.is_neg());
  return host;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kType, current)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kType, current)));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  at::NoGradGuard no_grad;
  CallStream::get().drain();
  on_host(to).copy_(on_host(from));
  return to;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (bytes > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

Tensor& set_(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
             c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage storage) {
  int64_t size = storage.nbytes() / self.element_size();
  return set_(self, std::move(storage), 0, {size}, {1});
}

Tensor& set_like(Tensor& self, const Tensor& other) {
  return set_(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_like);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("unfold", at::native::unfold);
}

// Copies resolve lazy conjugates and negatives themselves; torch would copy to resolve them.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  CallStream::get().drain();
  at::native::cpu_fallback(op, stack);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

struct Start {
  Start() {
    c10::SetAllocator(kType, &allocator);
    at::RegisterPrivateUse1HooksInterface(&hooks);
  }
} start;

}  // namespace

c10::intrusive_ptr<c10d::Backend> wrap(c10::intrusive_ptr<c10d::Backend> inner, std::string name,
                                       std::vector<at::ScalarType> reduced, bool narrow);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int index) { Guard().setDevice(Device(kType, DeviceIndex(index))); });
  m.def("device_count", [] { return int(kCount); });
  m.def("wrap", &wrap);
  m.def("defer_calls", [] { CallStream::get().deferred = true; });
}
