// Tell torch the current simulated device and stream of each thread.
//
// torch's own guard for Python backends calls Python. If a hook's exception is propagating through
// autograd, such a call aborts the process.

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdint>

namespace {

constexpr int kMostDevices = 4;  // autograd starts a thread per device

std::int64_t default_streams[kMostDevices];
thread_local int current_device = 0;
thread_local std::int64_t current_streams[kMostDevices];  // 0: default stream

std::int64_t (*record_event)(int device, std::int64_t stream) = nullptr;
void (*wait_for_event)(std::int64_t event, int device, std::int64_t stream) = nullptr;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;

    static c10::Device device(int index) {
        return {static_type, static_cast<c10::DeviceIndex>(index)};
    }

    c10::DeviceType type() const override { return static_type; }

    c10::Device exchangeDevice(c10::Device next) const override {
        const c10::Device before = getDevice();
        uncheckedSetDevice(next);
        return before;
    }

    c10::Device getDevice() const override { return device(current_device); }

    void setDevice(c10::Device next) const override { uncheckedSetDevice(next); }

    void uncheckedSetDevice(c10::Device next) const noexcept override {
        if (next.index() >= 0) current_device = next.index();
    }

    c10::Stream getStream(c10::Device of) const override {
        const int index = of.index() < 0 ? current_device : of.index();
        return c10::Stream(c10::Stream::UNSAFE, device(index), current_streams[index]);
    }

    c10::Stream getDefaultStream(c10::Device of) const override {
        return c10::Stream(c10::Stream::UNSAFE, of, 0);
    }

    c10::Stream exchangeStream(c10::Stream next) const override {
        const c10::Stream before = getStream(next.device());
        current_streams[next.device_index()] = next.id();
        return before;
    }

    c10::DeviceIndex deviceCount() const noexcept override { return kMostDevices; }

    // The pointer stores the number of the event plus 1, because null means no event.
    void record(
        void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag
    ) const override {
        const auto number = record_event(stream.device_index(), stream.id());
        *event = reinterpret_cast<void*>(static_cast<std::intptr_t>(number + 1));
    }

    void block(void* event, const c10::Stream& stream) const override {
        if (event == nullptr) return;
        const auto number = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(event)) - 1;
        wait_for_event(number, stream.device_index(), stream.id());
    }

    void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
    bool queryEvent(void*) const override { return true; }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
};

const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::PrivateUse1, new Guard());

}  // namespace

extern "C" {

int num_devices() { return kMostDevices; }
int get_device() { return current_device; }
void set_device(int index) { current_device = index; }
std::int64_t get_stream(int index) { return current_streams[index]; }
void set_stream(int index, std::int64_t stream) { current_streams[index] = stream; }

void set_calls(
    std::int64_t (*record)(int, std::int64_t), void (*wait)(std::int64_t, int, std::int64_t)
) {
    record_event = record;
    wait_for_event = wait;
}
}
