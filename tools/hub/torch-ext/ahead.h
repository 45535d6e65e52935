// The kernels that are compiled with the package, by name and constants.
#pragma once
#include <map>
#include <string>

inline std::map<std::string, const void*>& kernels() {
  static std::map<std::string, const void*> all;
  return all;
}

struct Ahead {
  Ahead(const char* name, const void* kernel) { kernels()[name] = kernel; }
};
