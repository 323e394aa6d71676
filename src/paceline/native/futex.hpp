// Sleeping on a word that other processes can change, and time.

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

// Sleep while the word is `seen`, for at most `timeout_ns`, or without limit if that is negative.
// Return false if the time has passed or a signal has come.
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
