//! What became of the grammars of the last requests.

use std::collections::HashMap;

use super::GrammarError;

/// Results in each half.
const HALF: usize = 512;
type Key = [u8; 32];

/// The results of the last 512 grammars at least, and of 1,024 at most.
#[derive(Debug, Default)]
pub struct Recent {
    newer: HashMap<Key, Result<(), GrammarError>>,
    older: HashMap<Key, Result<(), GrammarError>>,
}

impl Recent {
    /// A result that is used becomes new again.
    pub fn get(&mut self, key: &Key) -> Option<Result<(), GrammarError>> {
        if let Some(result) = self.newer.get(key) {
            return Some(result.clone());
        }
        let result = self.older.remove(key)?;
        self.put(*key, result.clone());
        Some(result)
    }

    pub fn put(&mut self, key: Key, result: Result<(), GrammarError>) {
        if self.newer.len() >= HALF {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(key, result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_known_and_the_number_is_bounded() {
        let key = |number: usize| {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&number.to_le_bytes());
            key
        };
        let mut recent = Recent::default();
        recent.put(key(0), Ok(()));
        for number in 1..10 * HALF {
            recent.put(key(number), Ok(()));
            // Used all the time.
            assert_eq!(recent.get(&key(0)), Some(Ok(())));
            assert!(recent.newer.len() + recent.older.len() <= 2 * HALF);
        }
        let last = 10 * HALF - 1;
        assert!((0..HALF / 2).all(|back| recent.get(&key(last - back)).is_some()));
        assert_eq!(recent.get(&key(1)), None);
    }
}
