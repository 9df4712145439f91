//! From a validated prompt to its tokens, whatever happens to the workers meanwhile.

pub mod api;
mod config;
mod driver;
mod machine;
mod meter;
mod service;
#[cfg(test)]
mod tests;

pub use config::Config;
pub use machine::config::OnKvLoss;
pub use service::Service;
