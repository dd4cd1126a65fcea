// Opens a file that `oxytorch.save` wrote and runs it, without Python:
//
//   run_program model.oxy 2,3,32,32
//
// runs a model of one float32 tensor on random numbers of that shape.
#include <oxytorch/program.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <sstream>

int main(int count, char** words) {
  if (count != 3) {
    std::cerr << "run_program: expected a file and a shape such as 2,3,32,32\n";
    return 2;
  }
  std::vector<int64_t> shape;
  std::istringstream sizes(words[2]);
  for (std::string size; std::getline(sizes, size, ',');) shape.push_back(std::stoll(size));
  try {
    const oxytorch::Program model(words[1]);
    std::cout << model.inputs();
    const at::Tensor x = at::randn(shape);
    std::vector<at::Tensor> results = model.run({x});  // the first call warms caches
    const auto start = std::chrono::steady_clock::now();
    results = model.run({x});
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    for (const at::Tensor& each : results) {
      std::cout << "result " << each.sizes() << " mean " << each.mean().item<double>() << "\n";
    }
    std::printf("%.3f ms\n", taken.count());
  } catch (const std::exception& error) {
    std::cerr << "run_program: " << error.what() << "\n";
    return 1;
  }
}
