// The launcher of our CUDA C++ kernels as an operator of PyTorch's dispatcher, for callers that have no Python. It
// includes no CUDA header and links no CUDA library: the driver and the current stream are found when it first runs, so
// it compiles wherever PyTorch is. A kernel takes one structure: pointers, the last one to its result, the stride of rows of
// its first tensor, and 32-bit numbers, of which the first two are the rows and columns of the result.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr int kMaxSharedAttribute = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

// What `numbers` of an operator's call begin with; one list, because each costs the host half a microsecond. Of kGiven,
// each pointer has a bit, the first one the lowest: 1 if there is a tensor for it; a 1 stands behind the last of them.
enum Numbers : size_t { kGridX, kGridY, kThreads, kShared, kGiven, kStride, kRows, kColumns, kFewest };

struct Driver {
  int (*load)(void**, const void*);
  int (*find)(void**, void*, const char*);
  int (*set)(void*, int, int);
  int (*start)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*stream)(int32_t, void**);
};

template <class F>
void resolve(F& function, void* library, const char* name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  TORCH_CHECK(function, "sparta_cuda::launch: ", name, " was not found; it needs a CUDA build of PyTorch and a driver");
}

const Driver& driver() {
  static const Driver found = [] {
    Driver d{};
    void* cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    TORCH_CHECK(cuda, "sparta_cuda::launch: the CUDA driver cannot be loaded: ", dlerror());
    // A CUDA build of PyTorch has loaded this already, but not for every library to see.
    void* torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
    resolve(d.load, cuda, "cuModuleLoadData");
    resolve(d.find, cuda, "cuModuleGetFunction");
    resolve(d.set, cuda, "cuFuncSetAttribute");
    resolve(d.start, cuda, "cuLaunchKernel");
    resolve(d.stream, torch ? torch : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
    return d;
  }();
  return found;
}

// A loaded kernel. Holding the code keeps its address, by which it is known, from being given to another one.
struct Loaded {
  at::Tensor code;
  void* function;
};

void* loaded(const at::Tensor& code, const std::string& name, int device, int shared) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, std::string, int>, Loaded> functions;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_tuple(code.const_data_ptr(), name, device);
  const auto found = functions.find(key);
  if (found != functions.end()) return found->second.function;
  void *module = nullptr, *function = nullptr;
  TORCH_CHECK(!driver().load(&module, code.const_data_ptr()), "sparta_cuda::launch: this code is not for this GPU");
  TORCH_CHECK(!driver().find(&function, module, name.c_str()), "sparta_cuda::launch: the code has no ", name);
  TORCH_CHECK(!driver().set(function, kMaxSharedAttribute, shared), "sparta_cuda::launch: ", name, " needs ", shared,
              " bytes of shared memory, more than the GPU has");
  functions.emplace(key, Loaded{code, function});
  return function;
}

void append(std::vector<char>& bytes, const void* value, size_t size) {
  const auto* begin = static_cast<const char*>(value);
  bytes.insert(bytes.end(), begin, begin + size);
}

at::Tensor launch(const at::Tensor& code, std::string name, at::TensorList tensors, at::IntArrayRef numbers) {
  TORCH_CHECK(numbers.size() >= kFewest, "sparta_cuda::launch: ", int{kFewest}, " numbers or more, not ", numbers.size());
  TORCH_CHECK(code.is_cpu() && code.is_contiguous() && code.scalar_type() == at::kByte,
              "sparta_cuda::launch: code must be bytes on the CPU");
  TORCH_CHECK(!tensors.empty(), "sparta_cuda::launch: the first tensor gives the device");
  const at::Tensor& first = tensors[0];
  const c10::DeviceGuard guard(first.device());
  at::Tensor y = at::empty({numbers[kRows], numbers[kColumns]}, first.options());
  if (!y.numel()) return y;
  std::vector<char> argument;
  argument.reserve(8 * 64 + 4 * numbers.size());
  const auto point = [&](const void* pointer) { append(argument, &pointer, sizeof pointer); };
  size_t used = 0;
  for (auto given = static_cast<uint64_t>(numbers[kGiven]); given > 1; given >>= 1) {
    if (given & 1) {
      TORCH_CHECK(used < tensors.size() && tensors[used].device() == first.device(),
                  "sparta_cuda::launch: too few tensors, or tensors of several devices");
      point(tensors[used++].const_data_ptr());
    } else {
      point(nullptr);
    }
  }
  TORCH_CHECK(used == tensors.size(), "sparta_cuda::launch: ", tensors.size(), " tensors for ", used, " pointers");
  point(y.data_ptr());
  append(argument, &numbers[kStride], sizeof(int64_t));
  for (const int64_t number : numbers.slice(kRows)) {
    const auto small = static_cast<int32_t>(number);
    append(argument, &small, sizeof small);
  }
  void* stream = nullptr;
  void* function = loaded(code, name, first.get_device(), static_cast<int>(numbers[kShared]));
  TORCH_CHECK(!driver().stream(first.get_device(), &stream), "sparta_cuda::launch: there is no current stream");
  void* arguments[] = {argument.data()};
  const auto size = [&](Numbers place) { return static_cast<unsigned>(numbers[place]); };
  const int failed = driver().start(function, size(kGridX), size(kGridY), 1, size(kThreads), 1, 1, size(kShared), stream,
                                    arguments, nullptr);
  TORCH_CHECK(!failed, "sparta_cuda::launch: the kernel did not start, error ", failed);
  return y;
}

}  // namespace

TORCH_LIBRARY(sparta_cuda, library) {
  library.def("launch(Tensor code, str name, Tensor[] tensors, SymInt[] numbers) -> Tensor");
}

TORCH_LIBRARY_IMPL(sparta_cuda, CUDA, library) { library.impl("launch", &launch); }
