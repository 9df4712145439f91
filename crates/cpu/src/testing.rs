//! Numbers for tests.

/// Repeatable random numbers.
pub struct Numbers(u64);

impl Numbers {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % limit
    }

    /// bfloat16 numbers between -1 and 1.
    pub fn bits(&mut self, len: usize) -> Vec<u16> {
        (0..len)
            .map(|_| bits(self.below(2001) as f32 / 1000.0 - 1.0))
            .collect()
    }
}

/// Round to bfloat16, to the nearest.
pub fn bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// bfloat16 as float32.
pub fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
