//! Reads metrics in Prometheus' text format, as far as load needs it.

/// The samples of one scrape.
pub struct Samples<'a>(&'a str);

impl<'a> Samples<'a> {
    pub fn new(text: &'a str) -> Self {
        Self(text)
    }

    /// The values of all series of a metric.
    pub fn values(&self, name: &str) -> impl Iterator<Item = f64> {
        self.series(name).map(|(_, value)| value)
    }

    /// Their sum; `None` if there is none of the names. The first name that exists counts.
    pub fn sum(&self, names: &[&str]) -> Option<f64> {
        names.iter().find_map(|name| {
            let values: Vec<f64> = self.values(name).collect();
            (!values.is_empty()).then(|| values.iter().sum())
        })
    }

    /// Labels, unparsed, and values of a metric's series.
    pub fn series(&self, name: &str) -> impl Iterator<Item = (&'a str, f64)> {
        self.0.lines().filter_map(move |line| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = match rest.strip_prefix('{') {
                Some(rest) => rest.rsplit_once('}')?,
                None => ("", rest.strip_prefix(' ')?),
            };
            let value = value.split_ascii_whitespace().next()?;
            Some((labels, value.parse().ok()?))
        })
    }
}

/// A label's value, of labels as in a series.
pub fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let mut rest = labels;
    loop {
        let at = rest.find(name)?;
        let whole = at == 0 || rest[..at].ends_with(',');
        let value = rest[at + name.len()..].strip_prefix("=\"");
        match value {
            Some(value) if whole => return value.split('"').next(),
            _ => rest = &rest[at + name.len()..],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_running_by{engine="0"} 9.0
vllm:cache_config_info{_block_size="7",block_size="128",num_gpu_blocks="182"} 1.0
process_start_time_seconds 1.79546674442e+09
"#;

    #[test]
    fn series_are_summed_over_their_labels() {
        let samples = Samples::new(TEXT);
        assert_eq!(
            samples.sum(&["none", "vllm:num_requests_running"]),
            Some(5.0)
        );
        assert_eq!(samples.sum(&["vllm:num_requests"]), None);
        let start = samples.sum(&["process_start_time_seconds"]);
        assert_eq!(start, Some(1_795_466_744.42));
        let (labels, _) = samples.series("vllm:cache_config_info").next().unwrap();
        assert_eq!(label(labels, "block_size"), Some("128"));
        assert_eq!(label(labels, "num_gpu_blocks"), Some("182"));
        assert_eq!(label(labels, "size"), None);
    }
}
