//! Numbers of the machines that workers are on.

use std::collections::HashSet;

/// Machines by their host names. A number whose machine has no worker is used again, so
/// there are never more than workers, however many came and went.
#[derive(Debug, Default)]
pub(super) struct Machines(Vec<String>);

impl Machines {
    /// The number of a machine, from 1; 0 without a name. `used`: the numbers of all workers.
    pub(super) fn number(&mut self, host: &str, used: impl Iterator<Item = u32>) -> u32 {
        if host.is_empty() {
            return 0;
        }
        if let Some(at) = self.0.iter().position(|known| known == host) {
            return number(at);
        }
        let used: HashSet<u32> = used.collect();
        let free = (0..self.0.len()).find(|&at| !used.contains(&number(at)));
        let at = free.unwrap_or_else(|| {
            self.0.push(String::new());
            self.0.len() - 1
        });
        host.clone_into(&mut self.0[at]);
        number(at)
    }
}

fn number(at: usize) -> u32 {
    u32::try_from(at + 1).expect("fewer machines than 2^32")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_machine_without_workers_is_used_again() {
        let mut machines = Machines::default();
        let mut number = |host, used: &[u32]| machines.number(host, used.iter().copied());
        assert_eq!(
            (number("", &[]), number("a", &[]), number("b", &[1])),
            (0, 1, 2)
        );
        assert_eq!(number("a", &[2]), 1);
        assert_eq!(number("c", &[2]), 1);
        assert_eq!(number("a", &[1, 2]), 3);
    }
}
