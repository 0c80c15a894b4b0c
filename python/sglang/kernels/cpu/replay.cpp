// A recorded sequence of calls, repeated.
#include "recorded.h"

struct Step {
  int (*function)(const Argument*);
  const Argument* arguments;
};

// Returns 0, or what the first function that failed returned; those behind it are not called.
extern "C" int sglang_replay(const Step* steps, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (const int error = steps[i].function(steps[i].arguments)) return error;
  return 0;
}
