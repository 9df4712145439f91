//! What requests saw, measured and simulated, beside each other.

use std::fmt::Write;

use serde::Serialize;
use tasuki_bench::slo::{Seen, Slo};
use tasuki_sim::Outcome;

/// One row of the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    pub name: &'static str,
    pub value: f64,
    /// Whether the replay is judged by it.
    #[serde(skip)]
    pub counts: bool,
}

/// What the requests of a run saw. Rows without a value, as TPOT of answers of one token, are left
/// out.
pub fn figures(outcomes: &[Outcome], slo: Option<&Slo>) -> Vec<Figure> {
    let served: Vec<&Outcome> = outcomes.iter().filter(|o| o.failure.is_none()).collect();
    let mut figures = Vec::new();
    let mut add = |name, value: f64, counts| {
        if value.is_finite() {
            figures.push(Figure {
                name,
                value,
                counts,
            });
        }
    };
    let spread = |of: fn(&Outcome) -> Option<f64>| {
        let mut all: Vec<f64> = served.iter().filter_map(|o| of(o)).collect();
        all.sort_by(f64::total_cmp);
        let at = |share: f64| all.get((share * (all.len() as f64 - 1.0)).round() as usize);
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let at = |share| at(share).copied().unwrap_or(f64::NAN);
        [mean, at(0.5), at(0.95)].map(|seconds| 1e3 * seconds)
    };
    let [mean, p50, p95] = spread(Outcome::ttft_s);
    add("ttft_mean_ms", mean, false);
    add("ttft_p50_ms", p50, true);
    add("ttft_p95_ms", p95, true);
    let [mean, p50, p95] = spread(Outcome::tpot_s);
    add("tpot_mean_ms", mean, false);
    add("tpot_p50_ms", p50, true);
    add("tpot_p95_ms", p95, true);
    let [_, p50, p95] = spread(|o| Some(o.end.s_since(o.due)));
    add("e2e_p50_ms", p50, false);
    add("e2e_p95_ms", p95, false);
    let from = served
        .iter()
        .map(|o| o.due.as_s())
        .fold(f64::INFINITY, f64::min);
    let until = served.iter().map(|o| o.end.as_s()).fold(0.0, f64::max);
    let over_s = (until - from).max(1e-9);
    let sum = |of: fn(&Outcome) -> u32| served.iter().map(|o| f64::from(of(o))).sum::<f64>();
    add("requests_per_s", served.len() as f64 / over_s, false);
    add(
        "output_tokens_per_s",
        sum(|o| o.output_tokens) / over_s,
        true,
    );
    let prompts = sum(|o| o.prompt_tokens).max(1.0);
    add(
        "cached_percent",
        100.0 * sum(|o| o.cached_tokens) / prompts,
        false,
    );
    let split = served.iter().filter(|o| o.is_split()).count() as f64;
    let all = outcomes.len().max(1) as f64;
    add("split_percent", 100.0 * split / all, false);
    let failed = (outcomes.len() - served.len()) as f64;
    add("failed_percent", 100.0 * failed / all, false);
    if let Some(slo) = slo {
        let met = served.iter().filter(|o| is_met(o, slo)).count() as f64;
        add("met_percent", 100.0 * met / all, false);
        add("goodput_per_s", met / over_s, false);
    }
    figures
}

/// Whether a request met the objectives.
pub fn is_met(outcome: &Outcome, slo: &Slo) -> bool {
    let Some(ttft_s) = outcome.ttft_s().filter(|_| outcome.failure.is_none()) else {
        return false;
    };
    slo.is_met(&Seen {
        ttft_s,
        ttst_s: outcome.second.map(|second| second.s_since(outcome.due)),
        tpot_s: outcome.tpot_s(),
        itl_max_s: outcome.longest_gap_s(),
        e2e_s: outcome.end.s_since(outcome.due),
    })
}

/// What most of the requests miss that do not meet the objectives; `None`: they all meet them.
pub fn most_missed(outcomes: &[&Outcome], slo: &Slo) -> Option<&'static str> {
    let none = Slo::default();
    #[rustfmt::skip]
    let each = [
        ("TTFT breaks first", Slo { ttft_s: slo.ttft_s, ..none }),
        ("TTST breaks first", Slo { ttst_s: slo.ttst_s, ..none }),
        ("TPOT breaks first", Slo { tpot_s: slo.tpot_s, ..none }),
        ("ITL breaks first", Slo { itl_s: slo.itl_s, ..none }),
        ("E2E breaks first", Slo { e2e_s: slo.e2e_s, ..none }),
    ];
    let missed = |slo: &Slo| outcomes.iter().filter(|o| !is_met(o, slo)).count();
    // A request that fails misses every objective.
    let failed = missed(&none);
    let mut most = (failed, "requests fail first");
    for (what, only) in each {
        let count = missed(&only) - failed;
        if count > most.0 {
            most = (count, what);
        }
    }
    (most.0 > 0).then_some(most.1)
}

/// By how much one value is off another, in percent of the first; of shares in percent, points.
pub fn difference(name: &str, from: f64, to: f64) -> Option<f64> {
    if name.ends_with("_percent") {
        return Some(to - from);
    }
    (from > 0.0).then(|| 100.0 * (to / from - 1.0))
}

/// How far a replay is off.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Trust {
    /// Of TTFT p50 and p95, TPOT p50 and p95, and output tokens a second; each in percent, without
    /// its sign.
    pub median_percent: f64,
    pub worst_percent: f64,
}

impl Trust {
    pub fn of(measured: &[Figure], replayed: &[Figure]) -> Self {
        let mut off: Vec<f64> = measured
            .iter()
            .filter(|figure| figure.counts)
            .filter_map(|figure| {
                let other = replayed.iter().find(|other| other.name == figure.name)?;
                difference(figure.name, figure.value, other.value).map(f64::abs)
            })
            .collect();
        off.sort_by(f64::total_cmp);
        Self {
            median_percent: off.get(off.len() / 2).copied().unwrap_or(f64::NAN),
            worst_percent: off.last().copied().unwrap_or(f64::NAN),
        }
    }
}

/// The table. `what_if`: of a second run.
pub fn table(measured: &[Figure], replayed: &[Figure], what_if: Option<&[Figure]>) -> String {
    let mut text = format!(
        "{:<22} {:>12} {:>12} {:>9}",
        "", "measured", "replayed", "off by"
    );
    if what_if.is_some() {
        let _ = write!(text, " {:>12} {:>9}", "what if", "change");
    }
    text.push('\n');
    for figure in replayed {
        let find = |of: &[Figure]| of.iter().find(|f| f.name == figure.name).map(|f| f.value);
        let real = find(measured);
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.2}"));
        let _ = write!(
            text,
            "{:<22} {:>12} {:>12} {:>9}",
            title(figure.name),
            number(real),
            number(Some(figure.value)),
            change(figure.name, real, Some(figure.value)),
        );
        if let Some(what_if) = what_if {
            let then = find(what_if);
            let changed = change(figure.name, Some(figure.value), then);
            let _ = write!(text, " {:>12} {changed:>9}", number(then));
        }
        text.push('\n');
    }
    text
}

fn change(name: &str, from: Option<f64>, to: Option<f64>) -> String {
    let (Some(from), Some(to)) = (from, to) else {
        return "-".to_owned();
    };
    let unit = if name.ends_with("_percent") {
        " pt"
    } else {
        "%"
    };
    difference(name, from, to).map_or("-".to_owned(), |by| format!("{by:+.1}{unit}"))
}

fn title(name: &str) -> &str {
    match name {
        "ttft_mean_ms" => "TTFT mean (ms)",
        "ttft_p50_ms" => "TTFT p50 (ms)",
        "ttft_p95_ms" => "TTFT p95 (ms)",
        "tpot_mean_ms" => "TPOT mean (ms)",
        "tpot_p50_ms" => "TPOT p50 (ms)",
        "tpot_p95_ms" => "TPOT p95 (ms)",
        "e2e_p50_ms" => "E2E p50 (ms)",
        "e2e_p95_ms" => "E2E p95 (ms)",
        "requests_per_s" => "requests/s",
        "output_tokens_per_s" => "output tokens/s",
        "cached_percent" => "prompt cached (%)",
        "split_percent" => "split (%)",
        "failed_percent" => "failed (%)",
        "met_percent" => "met the SLO (%)",
        "goodput_per_s" => "goodput (requests/s)",
        other => other,
    }
}
