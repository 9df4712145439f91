//! KV by pair of workers, as metrics: what each decode worker reports of the prefill workers
//! that it pulls from. An engine that is gone has no worker any more, and is left out.

use std::collections::HashMap;
use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use tasuki_wire::v1;

use super::{Labels, Reading};

const PAIRS: [Reading<v1::KvPair, f64>; 7] = [
    ("bytes", "KV bytes pulled, by pair of workers", |p| {
        p.bytes as f64
    }),
    ("pulls", "Pulls completed, by pair of workers", |p| {
        p.pulls as f64
    }),
    (
        "descriptors",
        "Descriptors of completed pulls, by pair of workers",
        |p| p.descriptors as f64,
    ),
    (
        "post_seconds",
        "Time to hand descriptors to the transport, by pair of workers",
        |p| p.post_s,
    ),
    (
        "wire_seconds",
        "Time of completed pulls from the first post to the last byte, by pair of workers",
        |p| p.wire_s,
    ),
    (
        "exposed_seconds",
        "Transfer time that clients waited for, by pair of workers",
        |p| p.exposed_s,
    ),
    (
        "reconnects",
        "Connections made anew after a failed transfer, by pair of workers",
        |p| p.reconnects as f64,
    ),
];

/// Writes the counters of every pair.
///
/// `engines` has the number of the worker that each engine is.
pub fn encode<'a>(
    encoder: &mut DescriptorEncoder,
    loads: impl Iterator<Item = (&'a Labels, &'a v1::Load)> + Clone,
    engines: &HashMap<String, String>,
) -> Result<(), fmt::Error> {
    let pairs = loads.flat_map(|(labels, load)| {
        let of_worker = load.kv_pairs.iter().filter_map(|pair| {
            let peer = ("peer", engines.get(&pair.engine_id)?.clone());
            let transport = ("transport", pair.transport.clone());
            let [worker, role, model] = labels.clone();
            Some(([worker, role, model, peer, transport], pair))
        });
        of_worker.collect::<Vec<_>>()
    });
    let pairs: Vec<_> = pairs.collect();
    for (name, help, read) in PAIRS {
        let name = format!("kv_pair_{name}");
        let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
        for (labels, pair) in &pairs {
            ConstCounter::new(read(pair)).encode(family.encode_family(labels)?)?;
        }
    }
    let help = "Handoffs that ended without their KV, by pair of workers and cause";
    let (name, kind) = ("kv_pair_failures", MetricType::Counter);
    let mut family = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, pair) in &pairs {
        for failure in &pair.failures {
            let [worker, role, model, peer, transport] = labels.clone();
            let cause = ("cause", failure.cause.clone());
            let labels = [worker, role, model, peer, transport, cause];
            ConstCounter::new(failure.count).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}
