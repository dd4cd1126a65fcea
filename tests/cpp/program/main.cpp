// A program without Python, for tests/program/test_cpp.py.
//
//   open FILE...                            a line for each: the file, a tab, "ok" or the error
//   run MODEL RESULTS FILE:DTYPE:SIZES...   runs on tensors read from files, writes the results
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include "oxytorch/program.h"

static at::Tensor read_tensor(const std::string& words) {
  std::istringstream parts(words);
  std::string path, dtype, sizes, size;
  std::getline(parts, path, ':');
  std::getline(parts, dtype, ':');
  std::getline(parts, sizes, ':');
  std::vector<int64_t> shape;
  for (std::istringstream list(sizes); std::getline(list, size, ',');) {
    shape.push_back(std::atoll(size.c_str()));
  }
  at::Tensor made = at::empty(shape, dtype == "int64" ? at::kLong : at::kFloat);
  std::ifstream(path, std::ios::binary).read(static_cast<char*>(made.data_ptr()), made.nbytes());
  return made;
}

static int run(int count, char** words) {
  const oxytorch::Program program(words[0]);
  std::vector<at::Tensor> inputs;
  for (int i = 2; i < count; ++i) inputs.push_back(read_tensor(words[i]));
  const std::vector<at::Tensor> results = program.run(inputs);
  std::vector<std::thread> threads;
  std::atomic<int> same{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 3; ++j) same += at::equal(program.run(inputs)[0], results[0]);
    });
  }
  for (std::thread& each : threads) each.join();
  std::cout << program.inputs() << "same in threads: " << same << "\n";
  for (std::size_t i = 0; i < results.size(); ++i) {
    const at::Tensor each = results[i].contiguous();
    std::ofstream(std::string(words[1]) + "." + std::to_string(i), std::ios::binary)
        .write(static_cast<const char*>(each.data_ptr()), each.nbytes());
    std::cout << "result " << each.sizes() << " " << each.dtype() << "\n";
  }
  return 0;
}

int main(int count, char** words) {
  try {
    if (count > 3 && std::strcmp(words[1], "run") == 0) return run(count - 2, words + 2);
  } catch (const std::exception& error) {
    std::cout << "error: " << error.what() << "\n";
    return 1;
  }
  for (int i = 2; i < count; ++i) {
    std::cout << words[i] << "\t";
    try {
      const oxytorch::Program program(words[i], std::strcmp(words[1], "verify") == 0);
      std::cout << "ok" << std::endl;
    } catch (const std::exception& error) {
      std::string text = error.what();
      for (char& each : text) each = static_cast<unsigned char>(each) < ' ' ? ' ' : each;
      std::cout << text << std::endl;
    }
  }
  return 0;
}
