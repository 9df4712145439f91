//! From a placed prompt to its tokens, whatever happens to the workers meanwhile.

pub mod api;
mod machine;
