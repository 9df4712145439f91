//! Where requests are placed, by each policy.

mod cost;
mod fleets;
mod reference;
mod simple;
