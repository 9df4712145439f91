//! What would change the answer: the same question with another load, objectives or links.

use serde::Serialize;

use super::per_s;
use super::planner::Planner;
use super::probe::Found;
use crate::error::SimulateError;

/// Designs that are simulated with the load doubled.
const TRIED: usize = 4;
/// Within this share of the best, the answer is the same: the search is no more precise.
const SAME: f64 = 0.95;

/// Another question, and its answer.
#[derive(Debug, Serialize)]
pub struct Variation {
    pub what: String,
    pub best: String,
    /// Requests a second within the objectives: the highest rate, or with the load doubled those of
    /// its requests that meet them.
    pub rate: f64,
    pub changes: bool,
    /// With the load doubled: for all of it, by the best design's rate for each GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub needs_gpus: Option<u32>,
}

impl Planner<'_> {
    /// `found`: the designs that were simulated, the highest rate first. `rate`: the one expected.
    pub(super) fn variations(
        &mut self,
        best: &Found,
        found: &[Found],
        rate: f64,
    ) -> Result<Vec<Variation>, SimulateError> {
        let mut told = vec![self.doubled(best, found, 2.0 * rate)?];
        let (limits, slo) = (self.limits, self.slo);
        self.limits.tpot_s /= 2.0;
        self.slo.tpot_s = Some(self.limits.tpot_s);
        told.push(self.variation("TPOT objective halved", best)?);
        (self.limits, self.slo) = (limits, slo);
        self.limits.ttft_s /= 2.0;
        self.slo.ttft_s = Some(self.limits.ttft_s);
        told.push(self.variation("TTFT objective halved", best)?);
        (self.limits, self.slo) = (limits, slo);
        let hardware = self.hardware.clone();
        for known in self.hardware.values_mut() {
            known.network.within_host.bytes_per_s /= 10.0;
            known.network.between_hosts.bytes_per_s /= 10.0;
        }
        told.push(self.variation("links a tenth as fast", best)?);
        self.hardware = hardware;
        Ok(told)
    }

    /// The highest rates do not change with the load. What does is who has the most goodput beyond
    /// them, and how many GPUs all of the load takes.
    fn doubled(
        &self,
        best: &Found,
        found: &[Found],
        rate: f64,
    ) -> Result<Variation, SimulateError> {
        let others = found.iter().filter(|f| f.design != best.design);
        let mut seen = Vec::new();
        for tried in std::iter::once(best).chain(others.take(TRIED - 1)) {
            seen.push((tried, self.see(&tried.design, rate)?.goodput));
        }
        let kept = seen[0].1;
        let (most, goodput) =
            seen.into_iter().fold(
                (best, kept),
                |most, other| {
                    if other.1 > most.1 { other } else { most }
                },
            );
        let same = best.rate >= rate || kept >= SAME * goodput;
        let each = best.rate / f64::from(best.design.gpus());
        let needs_gpus = (rate / each).ceil();
        Ok(Variation {
            what: format!("load doubled, {} requests/s", per_s(rate)),
            best: if same { &best.name } else { &most.name }.clone(),
            rate: if same { kept } else { goodput },
            changes: !same,
            needs_gpus: (best.rate < rate && needs_gpus.is_finite()).then_some(needs_gpus as u32),
        })
    }

    fn variation(&self, what: &str, best: &Found) -> Result<Variation, SimulateError> {
        let (mut found, _) = self.search()?;
        found.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        let first = found.first().ok_or(SimulateError::NoSteps)?;
        let same = |f: &&Found| f.name == best.name;
        let kept = found
            .iter()
            .find(same)
            .is_some_and(|kept| kept.rate >= SAME * first.rate);
        Ok(Variation {
            what: what.to_owned(),
            best: if kept { &best.name } else { &first.name }.clone(),
            rate: first.rate,
            changes: !kept,
            needs_gpus: None,
        })
    }
}
