//! From a validated prompt to its tokens: `tasuki_flow` in real time, over real streams.

pub mod api;
mod config;
mod driver;
pub(crate) mod events;
mod forecasts;
mod meter;
mod others;
mod service;
#[cfg(test)]
pub mod tests;

pub use config::Config;
#[cfg(test)]
pub use config::Tuning;
pub use service::Service;
pub use tasuki_flow::OnKvLoss;
