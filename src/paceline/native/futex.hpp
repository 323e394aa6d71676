// Sleep until another thread or process changes a word (futex); read the clock; pause in a loop.

#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace paceline {

inline std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// If the word equals `seen`, sleep until `futex_wake` is called on it. A negative `timeout_ns`
// means no limit. Return false after the timeout or a signal.
inline bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                       std::int64_t timeout_ns) {
    const timespec timeout = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    const long failed = syscall(SYS_futex, &word, FUTEX_WAIT, seen,
                                timeout_ns < 0 ? nullptr : &timeout, nullptr, 0);
    return failed == 0 || errno == EAGAIN;
}

inline void futex_wake(std::atomic<std::uint32_t>& word, std::uint32_t at_most) {
    syscall(SYS_futex, &word, FUTEX_WAKE, at_most, nullptr, nullptr, 0);
}

}  // namespace paceline
