//! Parses the text of llama-server's own `/metrics`. The caller makes the request.
//!
//! llama-server prints every number with six digits (b8827 and b10587 do). So from a million on, counters
//! rise in steps of 10, 100, and so on. An unchanged counter does not prove that the server is stalled.

/// llama-server's counters since its start. A value is `None` if the build does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BackendMetrics {
    /// `prompt_tokens_total`: number of prompt tokens evaluated.
    pub prompt_tokens: Option<u64>,
    /// `prompt_tokens_cached_total`: number of prompt tokens found in the cache; only in newer builds.
    pub cached_tokens: Option<u64>,
    /// `tokens_predicted_total`: number of tokens generated.
    pub output_tokens: Option<u64>,
    /// `n_decode_total`: number of calls of `llama_decode`; a stalled server makes none. Newer builds do
    /// not count the calls for images and for speculation.
    pub decodes: Option<u64>,
    /// `n_tokens_max`: the largest number of tokens in one sequence so far.
    pub largest_tokens: Option<u64>,
    /// `requests_processing`: number of requests being processed now.
    pub processing: Option<u64>,
    /// `requests_deferred`: number of requests that wait inside the server now.
    pub deferred: Option<u64>,
    /// `prompt_seconds_total`: seconds spent on prompts.
    pub prompt_seconds: Option<f64>,
    /// `tokens_predicted_seconds_total`: seconds spent generating.
    pub output_seconds: Option<f64>,
    /// `n_busy_slots_per_decode`: number of busy slots per decode call, average since the start.
    pub busy_slots_per_decode: Option<f64>,
    /// `predicted_tokens_seconds`: tokens per second, average since the last request for metrics.
    pub output_per_second: Option<f64>,
}

/// Prefix of all names of llama-server's metrics.
const METRIC_PREFIX: &str = "llamacpp:";

/// Parses the text. Unknown lines are skipped; a text without any known name gives all `None`.
pub fn parse(text: &str) -> BackendMetrics {
    let mut metrics = BackendMetrics::default();
    for (name, value) in text.lines().filter_map(parse_sample) {
        let whole = || Some(to_integer(value));
        match name {
            "prompt_tokens_total" => metrics.prompt_tokens = whole(),
            "prompt_tokens_cached_total" => metrics.cached_tokens = whole(),
            "tokens_predicted_total" => metrics.output_tokens = whole(),
            "n_decode_total" => metrics.decodes = whole(),
            "n_tokens_max" => metrics.largest_tokens = whole(),
            "requests_processing" => metrics.processing = whole(),
            "requests_deferred" => metrics.deferred = whole(),
            "prompt_seconds_total" => metrics.prompt_seconds = Some(value),
            "tokens_predicted_seconds_total" => metrics.output_seconds = Some(value),
            "n_busy_slots_per_decode" => metrics.busy_slots_per_decode = Some(value),
            "predicted_tokens_seconds" => metrics.output_per_second = Some(value),
            _ => {}
        }
    }
    metrics
}

/// Parses `llamacpp:name{labels} value [time]`; `None` for comments and values below 0 or infinite.
fn parse_sample(line: &str) -> Option<(&str, f64)> {
    let rest = line.trim().strip_prefix(METRIC_PREFIX)?;
    let end = rest.find(|char: char| char == '{' || char.is_ascii_whitespace())?;
    let (name, rest) = rest.split_at(end);
    // Labels end at the last brace: they may contain spaces, and braces in quotes.
    let rest = if rest.starts_with('{') { rest.rsplit_once('}')?.1 } else { rest };
    let value: f64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some((name, value))
}

/// Rounds to an integer. Large counters are printed as `1.2345e+09`, so all numbers are parsed as floats.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not below zero, and what is too large for a counter becomes its largest value"
)]
fn to_integer(value: f64) -> u64 {
    value.round() as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.\n\
        # TYPE llamacpp:prompt_tokens_total counter\n\
        llamacpp:prompt_tokens_total 1234\n\
        llamacpp:prompt_seconds_total 5.25\n\
        llamacpp:tokens_predicted_total 1.5e+09\n\
        llamacpp:tokens_predicted_seconds_total 99.5\n\
        llamacpp:n_decode_total 77\n\
        llamacpp:n_tokens_max 4096\n\
        llamacpp:n_busy_slots_per_decode 1.75\n\
        llamacpp:predicted_tokens_seconds 42.5\n\
        llamacpp:requests_processing 2\n\
        llamacpp:requests_deferred 1\n";

    #[test]
    fn the_counters_and_gauges_of_llama_server_are_read() {
        let expected = BackendMetrics {
            prompt_tokens: Some(1234),
            cached_tokens: None,
            output_tokens: Some(1_500_000_000),
            decodes: Some(77),
            largest_tokens: Some(4096),
            processing: Some(2),
            deferred: Some(1),
            prompt_seconds: Some(5.25),
            output_seconds: Some(99.5),
            busy_slots_per_decode: Some(1.75),
            output_per_second: Some(42.5),
        };
        assert_eq!(parse(TEXT), expected);
    }

    #[test]
    fn labels_times_and_windows_line_ends_do_no_harm() {
        let text = "llamacpp:n_decode_total{model=\"a } b\",slot=\"1\"} 7 1700000000\r\nllamacpp:requests_processing\t3\r\n";
        let metrics = parse(text);
        assert_eq!((metrics.decodes, metrics.processing), (Some(7), Some(3)));
    }

    #[test]
    fn what_is_missing_or_no_number_is_not_a_zero() {
        let text = "n_decode_total 5\nother:n_decode_total 6\nllamacpp:requests_processing NaN\n\
                    llamacpp:requests_deferred -1\nllamacpp:prompt_tokens_total\n{\"error\": \"not supported\"}\n";
        assert_eq!(parse(text), BackendMetrics::default());
    }

    #[test]
    fn a_counter_from_a_million_on_is_rounded() {
        assert_eq!(parse("llamacpp:n_decode_total 1.23457e+06").decodes, Some(1_234_570));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC*", name in "[a-z_]{0,12}", rest in "[ -~]{0,24}") {
            let _metrics = parse(&text);
            let _metrics = parse(&format!("llamacpp:{name}{rest}\nllamacpp:n_decode_total{rest}"));
        }

        #[test]
        fn a_counter_comes_back_as_it_was_written(count in 0_u64..1 << 53) {
            prop_assert_eq!(parse(&format!("llamacpp:n_decode_total {count}")).decodes, Some(count));
        }
    }
}
