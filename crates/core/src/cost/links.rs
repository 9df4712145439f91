//! What a handoff takes, learnt from handoffs, by the way between the two workers.

use super::fit::LinearFit;

/// A prior may be wrong by this factor.
const DOUBT: f64 = 10.0;
/// Before any measurement: what does not depend on the size, and a token's share.
const PRIOR_S: [f64; 2] = [0.01, 2e-6];

/// The two classes of ways between workers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    same_machine: LinearFit<2>,
    other_machine: LinearFit<2>,
}

impl Default for Links {
    fn default() -> Self {
        let prior = LinearFit::new(PRIOR_S, DOUBT);
        Self {
            same_machine: prior,
            other_machine: prior,
        }
    }
}

impl Links {
    /// Takes a handoff of so many tokens into account, `exposed_s` of which nothing hid.
    pub fn learn(&mut self, same_machine: bool, tokens: u64, exposed_s: f64) {
        let link = if same_machine {
            &mut self.same_machine
        } else {
            &mut self.other_machine
        };
        link.learn([1.0, tokens as f64], exposed_s);
    }

    /// What a handoff of so many tokens adds between the first token and the second; between
    /// machines never less than within one.
    pub fn handoff_s(&self, same_machine: bool, tokens: f64) -> f64 {
        let x = [1.0, tokens];
        let within_s = self.same_machine.at(&x);
        if same_machine {
            return within_s;
        }
        self.other_machine.at(&x).max(within_s)
    }
}
