//! From a Service's EndpointSlices to one set of addresses: pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::Event;

use super::super::{AddressSet, address};

/// In order of preference: a Service of both families lists each pod in both.
const FAMILIES: [&str; 3] = ["IPv4", "IPv6", "FQDN"];

/// What matters of one slice.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Slice {
    /// Index in [`FAMILIES`].
    family: usize,
    members: Vec<String>,
    /// Names of its ports.
    ports: Vec<String>,
}

/// All slices of a Service, by name.
#[derive(Debug)]
pub struct Slices {
    /// `None`: all.
    port: Option<String>,
    current: BTreeMap<String, Slice>,
    /// Of a list that is not complete.
    listed: Option<BTreeMap<String, Slice>>,
}

impl Slices {
    pub fn new(port: Option<String>) -> Self {
        Self {
            port,
            current: BTreeMap::new(),
            listed: None,
        }
    }

    /// Takes over what the API server said. True: what is known is complete.
    pub fn apply(&mut self, event: Event<EndpointSlice>) -> bool {
        match event {
            Event::Init => self.listed = Some(BTreeMap::new()),
            Event::InitApply(slice) => {
                let (name, slice) = self.read(&slice);
                self.listed.get_or_insert_default().insert(name, slice);
            }
            Event::InitDone => self.current = self.listed.take().unwrap_or_default(),
            Event::Apply(slice) => {
                let (name, slice) = self.read(&slice);
                self.current.insert(name, slice);
            }
            Event::Delete(slice) => {
                self.current
                    .remove(slice.metadata.name.as_deref().unwrap_or_default());
            }
        }
        self.listed.is_none()
    }

    /// Each address once, in a fixed order: an endpoint that moves between slices is in both.
    pub fn addresses(&self) -> AddressSet {
        let of_family = |family: usize| {
            let slices = self.current.values();
            let slices = slices.filter(move |slice| slice.family == family);
            slices.flat_map(|slice| slice.members.iter().cloned())
        };
        let sets = (0..FAMILIES.len()).map(|family| of_family(family).collect::<BTreeSet<_>>());
        let first = sets.into_iter().find(|set| !set.is_empty());
        first.unwrap_or_default().into_iter().collect()
    }

    /// Why there may be no address although there are endpoints.
    pub fn problem(&self) -> Option<String> {
        let wanted = self.port.as_ref()?;
        let ports: BTreeSet<&String> = self.current.values().flat_map(|s| &s.ports).collect();
        let is_there = ports.is_empty() || ports.contains(wanted);
        (!is_there).then(|| format!("it has no port named {wanted:?}; its ports are {ports:?}"))
    }

    fn read(&self, slice: &EndpointSlice) -> (String, Slice) {
        let name = slice.metadata.name.clone().unwrap_or_default();
        let family = FAMILIES.iter().position(|of| *of == slice.address_type);
        let named = |name: &Option<String>| name.clone().unwrap_or_default();
        let ports = slice.ports.iter().flatten();
        let wanted = ports.clone().filter(|port| {
            let is_tcp = port.protocol.as_deref().is_none_or(|is| is == "TCP");
            is_tcp && self.port.as_ref().is_none_or(|w| *w == named(&port.name))
        });
        let numbers: Vec<i32> = wanted.filter_map(|port| port.port).collect();
        // The first address is the endpoint; an evicted pod's is empty.
        let hosts = slice.endpoints.iter().filter_map(|e| e.addresses.first());
        let members = hosts.flat_map(|host| {
            let is_v6 = host.contains(':');
            let join = move |port| match is_v6 {
                true => format!("[{host}]:{port}"),
                false => format!("{host}:{port}"),
            };
            numbers.iter().map(join)
        });
        let slice = Slice {
            family: family.unwrap_or(FAMILIES.len()),
            members: members.filter(|member| address(member).is_ok()).collect(),
            ports: ports.map(|port| named(&port.name)).collect(),
        };
        (name, slice)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{endpoint, slice};
    use super::*;

    fn listed(port: Option<&str>, slices: &[EndpointSlice]) -> Slices {
        let mut read = Slices::new(port.map(str::to_owned));
        assert!(!read.apply(Event::Init));
        for slice in slices {
            assert!(!read.apply(Event::InitApply(slice.clone())), "half a list");
        }
        assert!(read.apply(Event::InitDone));
        read
    }

    #[test]
    fn members_are_addresses_times_ports_each_once() {
        let both = [endpoint("10.0.0.2"), endpoint("10.0.0.1")];
        let a = slice("a", "IPv4", &[("grpc", 7001), ("more", 7002)], &both);
        let b = slice("b", "IPv4", &[("grpc", 7001)], &both[..1]);
        let all = listed(None, &[a.clone(), b.clone()]);
        assert_eq!(
            all.addresses(),
            [
                "10.0.0.1:7001",
                "10.0.0.1:7002",
                "10.0.0.2:7001",
                "10.0.0.2:7002"
            ]
        );
        let one = listed(Some("grpc"), &[a, b]);
        assert_eq!(one.addresses(), ["10.0.0.1:7001", "10.0.0.2:7001"]);
        assert_eq!(one.problem(), None);
    }

    #[test]
    fn of_two_families_one_is_taken_and_addresses_without_an_ip_are_not() {
        let six = slice("six", "IPv6", &[("grpc", 1)], &[endpoint("fd00::1")]);
        let four = slice("four", "IPv4", &[("grpc", 1)], &[endpoint("10.0.0.1")]);
        let evicted = slice("gone", "IPv4", &[("grpc", 1)], &[endpoint("")]);
        let both = listed(None, &[six.clone(), four, evicted.clone()]);
        assert_eq!(both.addresses(), ["10.0.0.1:1"]);
        assert_eq!(listed(None, &[six, evicted]).addresses(), ["[fd00::1]:1"]);
    }

    #[test]
    fn a_list_replaces_all_and_changes_apply_to_one() {
        let a = slice("a", "IPv4", &[("grpc", 1)], &[endpoint("10.0.0.1")]);
        let b = slice("b", "IPv4", &[("grpc", 1)], &[endpoint("10.0.0.2")]);
        let mut slices = listed(None, std::slice::from_ref(&a));
        assert!(slices.apply(Event::Apply(b.clone())));
        assert_eq!(slices.addresses(), ["10.0.0.1:1", "10.0.0.2:1"]);
        assert!(slices.apply(Event::Delete(a)));
        assert_eq!(slices.addresses(), ["10.0.0.2:1"]);
        assert!(!slices.apply(Event::Init));
        assert_eq!(
            slices.addresses(),
            ["10.0.0.2:1"],
            "until the list is whole"
        );
        assert!(slices.apply(Event::InitDone));
        assert!(slices.addresses().is_empty(), "its deletion was missed");
    }

    #[test]
    fn a_port_of_another_name_is_a_problem() {
        let a = slice("a", "IPv4", &[("http", 1)], &[endpoint("10.0.0.1")]);
        let slices = listed(Some("grpc"), &[a]);
        assert!(slices.addresses().is_empty());
        let problem = slices.problem().expect("a problem");
        assert!(
            problem.contains("grpc") && problem.contains("http"),
            "{problem}"
        );
        assert_eq!(
            listed(Some("grpc"), &[]).problem(),
            None,
            "no endpoints yet"
        );
    }

    #[test]
    fn conditions_do_not_count() {
        let mut silent = endpoint("10.0.0.1");
        silent.conditions = Some(k8s_openapi::api::discovery::v1::EndpointConditions {
            ready: Some(false),
            serving: Some(false),
            terminating: Some(true),
        });
        let a = slice("a", "IPv4", &[("grpc", 1)], &[silent]);
        assert_eq!(listed(None, &[a]).addresses(), ["10.0.0.1:1"]);
    }
}
