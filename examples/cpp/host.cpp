// Runs a packaged sparse model without Python:
//   host MODEL.pt2 OPERATORS.so INPUT OUTPUT ROWS COLUMNS
// INPUT holds ROWS x COLUMNS float32 numbers; OUTPUT gets what the model returns for them, as float32 numbers.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 7) {
    std::cerr << "usage: host MODEL.pt2 OPERATORS.so INPUT OUTPUT ROWS COLUMNS\n";
    return 2;
  }
  // The sparse kernels register themselves with PyTorch when their library is loaded.
  if (dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  const int64_t rows = std::atoll(argv[5]), columns = std::atoll(argv[6]);
  std::vector<float> numbers(rows * columns);
  std::ifstream input(argv[3], std::ios::binary);
  if (!input.read(reinterpret_cast<char*>(numbers.data()), static_cast<std::streamsize>(numbers.size() * sizeof(float)))) {
    std::cerr << argv[3] << " holds fewer than " << rows * columns << " numbers\n";
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const at::Tensor x = at::from_blob(numbers.data(), {rows, columns}, at::kFloat);
  const at::Tensor y = model.run({x}).at(0).contiguous();
  std::ofstream output(argv[4], std::ios::binary);
  output.write(static_cast<const char*>(y.const_data_ptr()), static_cast<std::streamsize>(y.nbytes()));
  std::cout << "output " << y.sizes() << "\n";
  return output.good() ? 0 : 1;
}
