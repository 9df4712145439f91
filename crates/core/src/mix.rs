//! Numbers that look random and are the same each time, from numbers that are in order.

/// A bijection that leaves no pattern: a step of splitmix64 (Steele, Lea and Flood, "Fast
/// splittable pseudorandom number generators", 2014).
pub fn mix(value: u64) -> u64 {
    let x = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of the published generator with seed 0.
    #[test]
    fn it_is_splitmix64() {
        let state = 0x9e37_79b9_7f4a_7c15_u64;
        let drawn = [mix(0), mix(state), mix(state.wrapping_mul(2))];
        assert_eq!(
            drawn,
            [
                0xe220_a839_7b1d_cdaf,
                0x6e78_9e6a_a1b9_65f4,
                0x06c4_5d18_8009_454f
            ]
        );
    }
}
