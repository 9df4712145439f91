//! The sequences of a worker that decode, as one group: nothing here is done for each of them in
//! each step.
//!
//! All advance by one token a step, so a sequence is known by the step of its last token, and what
//! all attend to is a sum that grows by their number.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::SeqId;

/// See the module.
#[derive(Debug, Default)]
pub struct Decodes {
    /// Steps that decoded, ever.
    pub step: u64,
    count: u32,
    /// Sum over sequences of their computed tokens less the steps so far.
    offsets: i64,
    /// By the step after which they are done; some have left before.
    ends: BinaryHeap<Reverse<(u64, SeqId)>>,
    /// Sequences that need a block at the steps of each residue.
    growing: Vec<u32>,
}

/// Where a sequence stands among those that decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// Tokens computed, less the steps so far.
    offset: i64,
    /// The step after which it is done.
    pub end: u64,
    /// The step before its first.
    pub begin: u64,
}

impl Decodes {
    pub fn new(block_size: u32) -> Self {
        Self {
            growing: vec![0; block_size as usize],
            ..Self::default()
        }
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    /// That the next step attends to, its own tokens included.
    pub fn kv_tokens(&self) -> u64 {
        let kv = self.offsets + i64::from(self.count) * (self.step as i64 + 1);
        u64::try_from(kv).unwrap_or(0)
    }

    /// A sequence with so many tokens computed decodes for so many steps, at least one.
    pub fn join(&mut self, seq: SeqId, computed: u32, steps: u32) -> Place {
        let place = Place {
            offset: i64::from(computed) - self.step as i64,
            end: self.step + u64::from(steps),
            begin: self.step,
        };
        self.count += 1;
        self.offsets += place.offset;
        let residue = self.residue(&place);
        self.growing[residue] += 1;
        self.ends.push(Reverse((place.end, seq)));
        place
    }

    /// A sequence decodes no more.
    pub fn leave(&mut self, place: &Place) {
        self.count -= 1;
        self.offsets -= place.offset;
        let residue = self.residue(place);
        self.growing[residue] -= 1;
        if self.count == 0 {
            self.ends.clear();
        }
    }

    /// Tokens computed of a sequence now.
    pub fn computed(&self, place: &Place) -> u32 {
        u32::try_from(place.offset + self.step as i64).unwrap_or(0)
    }

    /// Steps until the next sequence ends; some that have left may count.
    pub fn steps_to_end(&self) -> u64 {
        let next = self.ends.peek();
        next.map_or(u64::MAX, |Reverse((end, _))| end.saturating_sub(self.step))
    }

    /// The next sequence that may be done by now.
    pub fn pop_ended(&mut self) -> Option<SeqId> {
        let Reverse((end, seq)) = *self.ends.peek()?;
        (end <= self.step).then(|| {
            self.ends.pop();
            seq
        })
    }

    /// Blocks that the next `steps` steps take.
    pub fn growth(&self, steps: u64) -> u64 {
        let size = self.growing.len() as u64;
        let whole = steps / size * u64::from(self.count);
        let rest = self.step..self.step + steps % size;
        let rest = rest.map(|step| u64::from(self.growing[(step % size) as usize]));
        whole + rest.sum::<u64>()
    }

    /// The steps of which residue begin a block of the sequence.
    fn residue(&self, place: &Place) -> usize {
        (-place.offset).rem_euclid(self.growing.len() as i64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_counts_as_its_sequences_would_one_by_one() {
        let (mut group, size) = (Decodes::new(4), 4);
        let mut alone: Vec<(SeqId, u32, u32, Place)> = Vec::new();
        let mut blocks = 0u64;
        for (seq, (computed, steps)) in [(7, 5), (8, 3), (1, 9), (4, 4)].into_iter().enumerate() {
            let place = group.join(seq as SeqId, computed, steps);
            alone.push((seq as SeqId, computed, steps, place));
            // Two steps between arrivals.
            for _ in 0..2 {
                let kv: u32 = alone.iter().map(|one| one.1 + 1).sum();
                assert_eq!(group.kv_tokens(), u64::from(kv));
                let grows = alone.iter().filter(|one| one.1 % size == 0).count() as u64;
                assert_eq!(group.growth(1), grows);
                blocks += grows;
                group.step += 1;
                for one in &mut alone {
                    one.1 += 1;
                    one.2 -= 1;
                    assert_eq!(group.computed(&one.3), one.1);
                }
                let mut ended: Vec<_> = std::iter::from_fn(|| group.pop_ended()).collect();
                ended.sort_unstable();
                let (done, rest) = alone.into_iter().partition(|one| one.2 == 0);
                let done: Vec<(SeqId, u32, u32, Place)> = done;
                assert_eq!(ended, done.iter().map(|one| one.0).collect::<Vec<_>>());
                done.iter().for_each(|one| group.leave(&one.3));
                alone = rest;
            }
        }
        assert!(blocks > 2);
        assert_eq!(group.count() as usize, alone.len());
        let one_by_one: u64 = (0..11)
            .map(|step| {
                alone
                    .iter()
                    .filter(|one| (one.1 + step) % size == 0)
                    .count() as u64
            })
            .sum();
        assert_eq!(group.growth(11), one_by_one);
    }
}
