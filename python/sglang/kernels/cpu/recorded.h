// A function without its types, for calls that are recorded once and repeated: arguments are 8 bytes each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

union Argument {
  int64_t integer;  // of any width
  double number;    // a float fits exactly
  void* pointer;
};

template <class A>
static inline A value_of(const Argument& argument) {
  if constexpr (std::is_pointer_v<A>)
    return static_cast<A>(argument.pointer);
  else if constexpr (std::is_floating_point_v<A>)
    return static_cast<A>(argument.number);
  else
    return static_cast<A>(argument.integer);
}

template <class R, class... A, std::size_t... I>
static inline int call_recorded(R (*function)(A...), const Argument* arguments, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<R>) {
    function(value_of<A>(arguments[I])...);
    return 0;
  } else {
    return function(value_of<A>(arguments[I])...);
  }
}

template <class R, class... A>
static inline int call_recorded(R (*function)(A...), const Argument* arguments) {
  return call_recorded(function, arguments, std::index_sequence_for<A...>{});
}

// NAME_recorded(arguments) is NAME(arguments...); 0 where NAME returns nothing.
#define RECORDABLE(NAME) \
  extern "C" int NAME##_recorded(const Argument* arguments) { return call_recorded(NAME, arguments); }
