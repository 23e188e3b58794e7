// The stream that the hand-off tests run on: a simulated device or, with MCCL_FAKE_METAL, the Metal shim over a fake
// Metal.
#pragma once

#ifdef MCCL_FAKE_METAL
#include "fake_metal.hpp"
using StreamUnderTest = mccl::FakeMetalStream;
#else
#include "device/sim.hpp"
using StreamUnderTest = mccl::SimStream;
#endif
