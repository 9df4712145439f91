//! A request on its way in: its body is read, checked and made into generations.

pub mod body;
pub mod constraint;
pub mod delivery;
pub mod intake;
pub mod prompt;
pub mod sampling;
pub mod tenant;
pub mod types;
pub mod validate;
