#include "torch/nested.hpp"

namespace mccl {

namespace {
thread_local Place current;  // tag 0: in no callback
thread_local uint64_t started = 0;

// Mixes 64 bits to 32 that are never 0 (the finalizer of MurmurHash3, public domain).
uint32_t mix(uint64_t h) {
  h ^= h >> 33;
  h *= 0xFF51AFD7ED558CCDull;
  h ^= h >> 33;
  h *= 0xC4CEB9FE1A85EC53ull;
  h ^= h >> 33;
  return static_cast<uint32_t>(h) | 1u;
}
}  // namespace

Place Place::child(uint64_t index) const { return {ticket, mix((uint64_t{tag} << 32) ^ index)}; }

Place place_of(uint64_t group, uint64_t ticket, uint32_t tag) {
  return {ticket, mix(group ^ (uint64_t{tag} * 0x9E3779B97F4A7C15ull))};
}

InCallback::InCallback(Place place) : outer_(current), outer_count_(started) {
  current = place;
  started = 0;
}

InCallback::~InCallback() {
  current = outer_;
  started = outer_count_;
}

NestedName next_nested_name() {
  if (current.tag == 0) return {};
  const Place place = current.child(++started);
  return {place.ticket, place.tag};
}

}  // namespace mccl
