//! Our legs on one worker, and the sum of what its last report cannot show of them.

use std::collections::BTreeMap;

use tasuki_core::Outstanding;

use super::running_leg::{LegSlot, RunningLeg};

/// Of one connection. The sum is kept with each change, since a report comes for every step.
#[derive(Debug, Default)]
pub(super) struct RunningLegs {
    /// By [`LegSlot`].
    slots: Vec<Option<RunningLeg>>,
    free_slots: Vec<u32>,
    dispatched: u64,
    /// Legs that the worker's load does not count: their slots, by number.
    uncounted: BTreeMap<u64, u32>,
    knows_waiting_kv: bool,
    outstanding: Outstanding,
}

impl RunningLegs {
    pub fn len(&self) -> usize {
        self.slots.len() - self.free_slots.len()
    }

    pub fn get(&self, slot: LegSlot) -> Option<&RunningLeg> {
        self.slots.get(slot.index as usize)?.as_ref()
    }

    /// Of the next leg.
    pub fn next_number(&self) -> u64 {
        self.dispatched + 1
    }

    pub fn outstanding(&self) -> Outstanding {
        self.outstanding
    }

    pub fn add(&mut self, leg: RunningLeg) -> LegSlot {
        self.dispatched += 1;
        self.outstanding += leg.outstanding(self.knows_waiting_kv);
        let number = leg.number;
        let index = match self.free_slots.pop() {
            Some(index) => {
                self.slots[index as usize] = Some(leg);
                index
            }
            None => {
                self.slots.push(Some(leg));
                u32::try_from(self.slots.len() - 1).expect("fewer legs than 2^32")
            }
        };
        self.uncounted.insert(number, index);
        LegSlot { index, number }
    }

    /// Changes a leg, if it is there.
    pub fn change<T>(
        &mut self,
        slot: LegSlot,
        change: impl FnOnce(&mut RunningLeg) -> T,
    ) -> Option<T> {
        let leg = self.slots.get_mut(slot.index as usize)?.as_mut()?;
        self.outstanding -= leg.outstanding(self.knows_waiting_kv);
        let changed = change(leg);
        self.outstanding += leg.outstanding(self.knows_waiting_kv);
        if leg.is_counted {
            self.uncounted.remove(&leg.number);
        }
        Some(changed)
    }

    pub fn remove(&mut self, slot: LegSlot) -> Option<RunningLeg> {
        let leg = self.slots.get_mut(slot.index as usize)?.take()?;
        self.outstanding -= leg.outstanding(self.knows_waiting_kv);
        self.uncounted.remove(&leg.number);
        self.free_slots.push(slot.index);
        Some(leg)
    }

    /// The worker reported its load, which counts legs up to the number `applied`.
    pub fn on_load(&mut self, applied: Option<u64>, knows_waiting_kv: bool) {
        while let Some(entry) = self.uncounted.first_entry()
            && applied.is_some_and(|applied| *entry.key() <= applied)
        {
            let (number, index) = entry.remove_entry();
            self.change(LegSlot { index, number }, |leg| leg.is_counted = true);
        }
        if std::mem::replace(&mut self.knows_waiting_kv, knows_waiting_kv) != knows_waiting_kv {
            self.outstanding = self.count();
        }
    }

    /// The sum, over all legs.
    fn count(&self) -> Outstanding {
        let mut sum = Outstanding::default();
        for leg in self.slots.iter().flatten() {
            sum += leg.outstanding(self.knows_waiting_kv);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const REGRESSIONS: &[u64] = &[];

    fn leg(number: u64, random: &mut StdRng) -> RunningLeg {
        let decodes = random.random_bool(0.6);
        let sequences = if decodes {
            random.random_range(1..4)
        } else {
            0
        };
        RunningLeg {
            prefill_tokens: random.random_range(0..3) * 50,
            placed: random.random_bool(0.7).then(Default::default),
            promised_blocks: random.random_range(1..9),
            sequences,
            kv_tokens: u64::from(sequences) * 70,
            handoff: None,
            peer: None,
            redeems: false,
            number,
            produced: 0,
            is_counted: false,
            has_blocks: false,
        }
    }

    #[test]
    fn the_sum_is_that_of_all_legs_after_every_change() {
        tasuki_searches::run(200, REGRESSIONS, |seed| {
            let mut random = StdRng::seed_from_u64(seed);
            let (mut legs, mut slots) = (RunningLegs::default(), Vec::new());
            let (mut applied, mut seen) = (0, Vec::new());
            for _ in 0..60 {
                let chosen = random.random_range(0..slots.len().max(1));
                match random.random_range(0..5) {
                    0 | 1 => slots.push(legs.add(leg(legs.next_number(), &mut random))),
                    2 if !slots.is_empty() => {
                        let counts = random.random_bool(0.7);
                        let output = |leg: &mut RunningLeg| {
                            leg.placed = None;
                            leg.prefill_tokens = 0;
                            leg.has_blocks |= counts;
                            leg.is_counted |= counts;
                        };
                        legs.change(slots[chosen], output).expect("it is there");
                        seen.extend(counts.then_some(slots[chosen].number));
                    }
                    3 if !slots.is_empty() => {
                        let slot = slots.swap_remove(chosen);
                        let removed = legs.remove(slot).expect("it is there");
                        assert_eq!(removed.number, slot.number);
                        assert!(legs.remove(slot).is_none() && legs.get(slot).is_none());
                    }
                    _ => {
                        let told = random.random_range(0..legs.next_number());
                        let told = random.random_bool(0.8).then_some(told);
                        applied = applied.max(told.unwrap_or(0));
                        legs.on_load(told, random.random_bool(0.7));
                    }
                }
                assert_eq!(legs.outstanding(), legs.count());
                assert_eq!(legs.len(), slots.len());
                for slot in &slots {
                    let counted = slot.number <= applied || seen.contains(&slot.number);
                    let leg = legs.get(*slot).expect("it is there");
                    assert_eq!(leg.is_counted, counted, "leg {}", slot.number);
                    assert_eq!(legs.uncounted.contains_key(&slot.number), !counted);
                }
                assert!(legs.uncounted.len() <= slots.len());
            }
        });
    }
}
