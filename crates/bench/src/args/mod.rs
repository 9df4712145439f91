//! The command line of what to send and when. The client flattens these into
//! its own.

mod arrival;
mod choose;
mod foreign;
#[cfg(test)]
mod tests;
mod values;
mod workload;

pub use arrival::{ArrivalArgs, ArrivalKind};
pub(crate) use values::MAX_TOKENS;
pub use workload::{Answers, WorkloadArgs, WorkloadKind};
