// The pool alone under a sanitizer.
#include "pool_checks.hpp"

using namespace weft;

int main(int, char** words) {
  const int rounds = std::atoi(words[1]);
  run_callers([&](int) {
    for (int i = 0; i < rounds; ++i) {
      check_phases();
      check_shares();
      check_places();
      if (i % 8 == 0) check_throwing();
      if (i % 8 == 1) check_scope();
    }
  });
  std::puts("good");
}
