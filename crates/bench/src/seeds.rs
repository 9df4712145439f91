//! Where randomness comes from: every purpose has streams of its own, so that
//! one more draw for one purpose changes nothing for another. The same seed
//! gives the same workload whatever the arrivals, and the other way round.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// What random numbers are drawn for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// The gaps between arrivals.
    Arrivals = 1,
    /// Lengths in tokens.
    Lengths = 2,
    /// How long users think.
    Thinking = 3,
    /// The tokens that one request has for itself.
    OwnTokens = 4,
    /// The tokens that requests share.
    SharedTokens = 5,
    /// The blocks of a trace, by their hash.
    TraceTokens = 6,
    /// Which prefix a request has.
    Groups = 7,
}

/// One of 2^56 streams of a purpose, as one number.
#[must_use]
pub fn stream(purpose: Purpose, number: u64) -> u64 {
    (u64::from(purpose as u8) << 56) | (number & ((1 << 56) - 1))
}

/// The generator of a stream: independent of all other streams, the same on
/// every machine.
#[must_use]
pub fn generator(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    generator.set_stream(stream);
    generator
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::{Purpose, generator, stream};

    #[test]
    fn streams_differ_and_repeat() {
        let draw = |seed, purpose, number| -> [u64; 4] {
            generator(seed, stream(purpose, number)).random()
        };
        let one = draw(1, Purpose::Lengths, 0);
        assert_eq!(one, draw(1, Purpose::Lengths, 0));
        assert_ne!(one, draw(2, Purpose::Lengths, 0));
        assert_ne!(one, draw(1, Purpose::Lengths, 1));
        assert_ne!(one, draw(1, Purpose::Arrivals, 0));
    }
}
