//! Usage metrics of each API key. The number of keys in the key file bounds the number of labels.

use std::sync::atomic::Ordering;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use warden_gateway::KeyCounts;

use super::families::to_gauge;
use super::families::{families, labels};

labels! {
    KeyLabel { key: String }
    KindLabels { key: String, kind: &'static str }
    ReasonLabels { key: String, reason: &'static str }
}

families! {
    pub(super) struct KeyMetrics () {
        requests: Family<KeyLabel, Counter> = "key_requests", "Requests of an API key that ended.";
        in_flight: Family<KeyLabel, Gauge> = "key_in_flight", "Requests of an API key under way.";
        rejected: Family<ReasonLabels, Counter>
            = "key_rejected",
            "Requests of an API key that were refused: `rate`, `tokens`, `concurrency`, or `model`. Requests \
             without a right key are among `request_outcomes` as `no_key` and `wrong_key`.";
        tokens: Family<KindLabels, Counter>
            = "key_tokens", "Tokens that an API key has used, `prompt` (evaluated) and `output`.";
    }
}

impl KeyMetrics {
    /// Copies the gateway's counts; removed keys have no lines.
    pub(super) fn read(&self, counts: &[KeyCounts]) {
        self.requests.clear();
        self.in_flight.clear();
        self.rejected.clear();
        self.tokens.clear();
        for counts in counts {
            let key = || counts.name.to_string();
            let set = |counter: &Counter, number: u64| counter.inner().store(number, Ordering::Relaxed);
            set(&self.requests.get_or_create(&KeyLabel { key: key() }), counts.requests);
            self.in_flight.get_or_create(&KeyLabel { key: key() }).set(to_gauge(counts.running));
            for (reason, number) in &counts.rejected {
                set(&self.rejected.get_or_create(&ReasonLabels { key: key(), reason }), *number);
            }
            for (kind, number) in [("prompt", counts.prompt_tokens), ("output", counts.output_tokens)] {
                set(&self.tokens.get_or_create(&KindLabels { key: key(), kind }), number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn each_key_has_its_lines_and_one_that_is_gone_has_none() {
        let metrics = KeyMetrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let counts = |name: &str| KeyCounts {
            name: name.into(),
            requests: 3,
            running: 1,
            prompt_tokens: 10,
            output_tokens: 20,
            rejected: vec![("rate", 2)],
        };
        let text = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        metrics.read(&[counts("alice"), counts("bob")]);
        for line in [
            "key_requests_total{key=\"alice\"} 3\n",
            "key_in_flight{key=\"bob\"} 1\n",
            "key_rejected_total{key=\"bob\",reason=\"rate\"} 2\n",
            "key_tokens_total{key=\"alice\",kind=\"output\"} 20\n",
        ] {
            assert!(text().contains(line), "{line} is missing in {}", text());
        }
        metrics.read(&[counts("bob")]);
        assert!(!text().contains("alice") && text().contains("bob"));
    }
}
