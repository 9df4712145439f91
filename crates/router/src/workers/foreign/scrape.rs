//! What a worker's metrics say of its load.

use tasuki_flow::fleet::LoadReport;

use super::prometheus::{Samples, label};
use super::recomputed::KvSources;
use crate::discovery::Engine;

/// Of a worker that does not tell: room is its own matter then.
pub const UNKNOWN_BLOCKS: u32 = 1 << 20;
pub const USUAL_BLOCK_TOKENS: u32 = 16;

/// A worker's load by its metrics.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scrape {
    /// `None`: it has no metrics of that.
    pub load: Option<LoadReport>,
    pub total_blocks: Option<u32>,
    pub block_tokens: u32,
    /// When its process began, in seconds.
    pub started: Option<f64>,
    pub sources: Option<KvSources>,
}

/// What a page of metrics says.
pub fn scrape(engine: Engine, samples: &Samples<'_>) -> Scrape {
    let pool = match engine {
        Engine::Vllm => vllm_pool(samples),
        Engine::Sglang => {
            let tokens = samples.sum(&["sglang:max_total_num_tokens"]);
            tokens.map(|tokens| (tokens as u32 / USUAL_BLOCK_TOKENS, USUAL_BLOCK_TOKENS))
        }
    };
    let [running, waiting, usage] = match engine {
        Engine::Vllm => [
            &["vllm:num_requests_running"][..],
            &["vllm:num_requests_waiting"],
            &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
        ],
        Engine::Sglang => [
            &["sglang:num_running_reqs"][..],
            &["sglang:num_queue_reqs"],
            &["sglang:token_usage"],
        ],
    };
    let (blocks, block_tokens) = pool.unwrap_or((UNKNOWN_BLOCKS, USUAL_BLOCK_TOKENS));
    let load = samples.sum(running).map(|running| {
        let waiting = samples.sum(waiting).unwrap_or(0.0) as u32;
        // A share of the pool; of several ranks the mean.
        let name = usage.iter().find(|name| samples.sum(&[name]).is_some());
        let shares: Vec<f64> = name
            .map(|name| samples.values(name).collect())
            .unwrap_or_default();
        let used = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
        let used = (f64::from(blocks) * used.clamp(0.0, 1.0)) as u32;
        LoadReport {
            waiting_requests: waiting,
            running_requests: running as u32,
            running_sequences: running as u32,
            waiting_sequences: waiting,
            free_blocks: blocks - used,
            running_kv_tokens: u64::from(used) * u64::from(block_tokens),
            ..LoadReport::default()
        }
    });
    // Of all ranks.
    let from = |source: &str| {
        let series = samples.series("vllm:prompt_tokens_by_source_total");
        let found = series.filter(|(labels, _)| label(labels, "source") == Some(source));
        found
            .map(|(_, value)| value)
            .reduce(|sum, value| sum + value)
    };
    let sources = from("external_kv_transfer").zip(from("local_compute"));
    Scrape {
        load,
        total_blocks: pool.map(|(blocks, _)| blocks),
        block_tokens,
        started: samples.sum(&["process_start_time_seconds"]),
        sources: sources.map(|(transferred, computed)| KvSources {
            transferred,
            computed,
        }),
    }
}

/// Blocks of all ranks, and the tokens of each.
fn vllm_pool(samples: &Samples<'_>) -> Option<(u32, u32)> {
    let mut pool = None;
    for (labels, _) in samples.series("vllm:cache_config_info") {
        let number = |name| label(labels, name)?.parse::<u32>().ok();
        let (blocks, tokens) = number("num_gpu_blocks").zip(number("block_size"))?;
        let (sum, _) = pool.unwrap_or((0, 0));
        pool = Some((u32::saturating_add(sum, blocks), tokens.max(1)));
    }
    pool
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_and_pool_are_read_from_metrics() {
        let text = "vllm:num_requests_running{engine=\"0\"} 2.0\n\
            vllm:num_requests_waiting{engine=\"0\"} 1.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
            vllm:cache_config_info{block_size=\"128\",num_gpu_blocks=\"200\"} 1.0\n\
            vllm:prompt_tokens_by_source_total{source=\"local_compute\"} 9.0\n\
            vllm:prompt_tokens_by_source_total{source=\"external_kv_transfer\"} 50.0\n";
        let found = scrape(Engine::Vllm, &Samples::new(text));
        let load = found.load.expect("a load");
        assert_eq!((load.running_requests, load.waiting_requests), (2, 1));
        assert_eq!((load.free_blocks, load.running_kv_tokens), (150, 50 * 128));
        assert_eq!((found.total_blocks, found.block_tokens), (Some(200), 128));
        let sources = found.sources.expect("sources");
        assert_eq!((sources.transferred, sources.computed), (50.0, 9.0));
        let of = |engine: u8, tokens: u8| {
            let by_source = "vllm:prompt_tokens_by_source_total";
            format!(
                "{by_source}{{engine=\"{engine}\",source=\"local_compute\"}} {tokens}.0\n\
                 {by_source}{{engine=\"{engine}\",source=\"external_kv_transfer\"}} 2.0\n"
            )
        };
        let ranks = scrape(Engine::Vllm, &Samples::new(&(of(0, 3) + &of(1, 4))));
        let sources = ranks.sources.expect("sources");
        assert_eq!((sources.transferred, sources.computed), (4.0, 7.0));
        let text = "sglang:num_running_reqs{m=\"x\"} 3.0\nsglang:num_queue_reqs{m=\"x\"} 0.0\n\
            sglang:token_usage{m=\"x\"} 0.5\nsglang:max_total_num_tokens{m=\"x\"} 3200.0\n";
        let load = scrape(Engine::Sglang, &Samples::new(text))
            .load
            .expect("a load");
        assert_eq!((load.running_requests, load.free_blocks), (3, 100));
        let none = scrape(Engine::Vllm, &Samples::new("# nothing\n"));
        assert!(none.load.is_none() && none.sources.is_none() && none.total_blocks.is_none());
    }
}
