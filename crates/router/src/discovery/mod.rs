//! Where the workers are: whole sets of addresses, never events.
//!
//! A source that fails keeps its last set. `workers::follow` makes the registry match.

mod address;
#[cfg(test)]
mod conformance;
mod dns;
mod file;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod source;

use std::collections::HashSet;

use futures::StreamExt;
use futures::stream::{self, BoxStream, Stream};

pub use address::{Address, Engine, ForeignAddress, NotAnAddress};
pub use dns::Dns;
pub use file::WatchedFile;
pub use source::{Source, Sources};

/// Addresses, each HOST:PORT or a URL ([`Address`]), in the order in which the source has them.
pub type AddressSet = Vec<String>;

/// A source of worker addresses.
pub trait Discovery: Send {
    /// The set of addresses: the first one as soon as it is known, then every one that
    /// differs from the one before, whole. A failure is logged and yields nothing.
    fn watch(self: Box<Self>) -> BoxStream<'static, AddressSet>;
}

/// A list that never changes.
pub struct StaticList(pub AddressSet);

impl Discovery for StaticList {
    fn watch(self: Box<Self>) -> BoxStream<'static, AddressSet> {
        stream::iter([self.0]).boxed()
    }
}

/// The addresses that any of the sources has, each once.
pub fn union(sources: Vec<Box<dyn Discovery>>) -> impl Stream<Item = AddressSet> + Send + Unpin {
    let mut sets = vec![AddressSet::new(); sources.len()];
    let sources = sources.into_iter().enumerate();
    let numbered = sources.map(|(at, source)| source.watch().map(move |set| (at, set)));
    stream::select_all(numbered).map(move |(at, set)| {
        sets[at] = set;
        let mut seen = HashSet::new();
        let all = sets.iter().flatten().cloned();
        all.filter(|address| seen.insert(address.clone())).collect()
    })
}

/// Checks a worker's address.
///
/// # Errors
///
/// [`NotAnAddress`]: what is wrong with it.
pub fn address(given: &str) -> Result<String, NotAnAddress> {
    Address::parse(given).map(|_| given.to_owned())
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn set(addresses: &[&str]) -> AddressSet {
        addresses
            .iter()
            .map(|&address| address.to_owned())
            .collect()
    }

    #[tokio::test]
    async fn the_union_has_what_any_source_has() {
        struct Two;
        impl Discovery for Two {
            fn watch(self: Box<Self>) -> BoxStream<'static, AddressSet> {
                stream::iter([set(&["b:1", "c:1"]), set(&["c:1"])]).boxed()
            }
        }
        let list = StaticList(set(&["a:1", "b:1"]));
        let mut sets: Vec<AddressSet> = union(vec![Box::new(list), Box::new(Two)]).collect().await;
        assert_eq!(sets.len(), 3);
        assert_eq!(sets.pop(), Some(set(&["a:1", "b:1", "c:1"])));
    }
}
