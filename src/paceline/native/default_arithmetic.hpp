// Sets the thread's rounding mode and denormal handling to the defaults until it is destroyed.

#pragma once

#include <cfenv>

namespace paceline {

class DefaultArithmetic {
public:
    DefaultArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&before_); }
    DefaultArithmetic(const DefaultArithmetic&) = delete;
    DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

private:
    std::fenv_t before_;
};

}  // namespace paceline
