//! Trace context of a request, incoming and outgoing, and the decision to record the trace: W3C Trace Context
//! (Recommendation of 23 November 2021).
//!
//! ```text
//!   traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
//!                |  trace (16 bytes, not 0)          parent (8, not 0) flags: 01 = the parent is recorded
//!                version; later versions are parsed by the rules of this one
//! ```
//!
//! An invalid value begins a new trace (section 4.3 of the Recommendation).

use std::fmt;

/// Flag: the sender records its part of the trace.
const SAMPLED: u8 = 1;
/// Flag: the low 56 bits of the trace id are random (level 2 of the Recommendation).
const RANDOM: u8 = 2;

/// Most members of a `tracestate` (section 3.3.1.1).
const STATE_MEMBERS: usize = 32;
/// Most characters of a `tracestate` that are passed on: the required minimum (section 3.3.1.5).
const STATE_CHARS: usize = 512;

/// Id of a trace; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceId(u128);

/// Id of a span; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId(u64);

impl TraceId {
    /// Creates an id from a random number; the invalid 0 becomes 1.
    pub const fn from_random(drawn: u128) -> Self {
        Self(if drawn == 0 { 1 } else { drawn })
    }

    /// Returns the bytes sent to a collector.
    pub const fn bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }
}

impl SpanId {
    /// Creates an id from a random number; the invalid 0 becomes 1.
    pub const fn from_random(drawn: u64) -> Self {
        Self(if drawn == 0 { 1 } else { drawn })
    }

    /// Returns the bytes sent to a collector.
    pub const fn bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }

    /// Returns the id of this span's `n`th child span: pseudo-random, and equal at each call.
    #[must_use]
    pub fn child_id(self, n: u32) -> Self {
        // SplitMix64 (Steele, Lea, Flood 2014), which gives a different number for each `n`.
        let mut mixed = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(u64::from(n) + 1));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        Self::from_random(mixed ^ (mixed >> 31))
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Trace context that a client sent with its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IncomingContext {
    /// Trace of the request.
    pub trace: TraceId,
    /// Parent span of the request.
    pub parent: SpanId,
    flags: u8,
}

impl IncomingContext {
    /// Parses a `traceparent`; `None` if invalid.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let value = std::str::from_utf8(value).ok()?;
        let (version, rest) = value.split_once('-')?;
        let version = parse_hex(version, 2)?;
        let (trace, rest) = rest.split_once('-')?;
        let (parent, rest) = rest.split_once('-')?;
        // Later versions may append fields after the flags only.
        let flags = match rest.split_once('-') {
            Some((flags, _)) if version > 0 => flags,
            Some(_) => return None,
            None => rest,
        };
        let (trace, parent, flags) = (parse_hex(trace, 32)?, parse_hex(parent, 16)?, parse_hex(flags, 2)?);
        if version == 0xff || trace == 0 || parent == 0 {
            return None;
        }
        let (parent, flags) = (u64::try_from(parent).ok()?, u8::try_from(flags).ok()?);
        Some(Self { trace: TraceId(trace), parent: SpanId(parent), flags })
    }

    /// Returns true if the parent is recorded.
    pub const fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }
}

fn parse_hex(text: &str, digits: usize) -> Option<u128> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != digits || !text.bytes().all(is_digit) {
        return None;
    }
    u128::from_str_radix(text, 16).ok()
}

/// Returns true if a request's `tracestate` fields, one list (RFC 9110 section 5.3), may be passed on.
pub fn is_sound_state<'a>(values: impl IntoIterator<Item = &'a [u8]>) -> bool {
    let (mut members, mut chars) = (0, 0);
    let mut keys: Vec<&[u8]> = Vec::new();
    for value in values {
        chars += value.len() + 1;
        for member in value.split(|byte| *byte == b',') {
            let member = member.trim_ascii();
            if member.is_empty() {
                continue;
            }
            let Some(at) = member.iter().position(|byte| *byte == b'=') else { return false };
            let (key, value) = (&member[..at], &member[at + 1..]);
            members += 1;
            if members > STATE_MEMBERS || !is_key(key) || !is_value(value) || keys.contains(&key) {
                return false;
            }
            keys.push(key);
        }
    }
    chars <= STATE_CHARS + 1
}

/// Returns true for a key as in section 3.3.1.3.1: `vendor` or `tenant@vendor`.
fn is_key(key: &[u8]) -> bool {
    let is_in = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'*' | b'/');
    let is_part = |part: &[u8], most: usize, first: fn(u8) -> bool| {
        part.len() <= most && part.first().is_some_and(|byte| first(*byte)) && part.iter().all(is_in)
    };
    let letter: fn(u8) -> bool = |byte| byte.is_ascii_lowercase();
    let letter_or_digit: fn(u8) -> bool = |byte| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    match key.iter().position(|byte| *byte == b'@') {
        Some(at) => is_part(&key[..at], 241, letter_or_digit) && is_part(&key[at + 1..], 14, letter),
        None => is_part(key, 256, letter),
    }
}

fn is_value(value: &[u8]) -> bool {
    let is_in = |byte: &u8| matches!(byte, 0x20..=0x2b | 0x2d..=0x3c | 0x3e..=0x7e);
    (1..=256).contains(&value.len()) && value.iter().all(is_in) && value.last() != Some(&b' ')
}

/// Trace context of a request at this instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTraceContext {
    /// Trace of the request.
    pub trace: TraceId,
    /// Span of the request.
    pub span: SpanId,
    /// External parent span; `None` if the trace begins here.
    pub parent: Option<SpanId>,
    flags: u8,
}

impl RequestTraceContext {
    /// Derives the context of a request. Without a parent, the trace is recorded with probability `ratio` (0
    /// to 1). The trace id decides, so that other programs with the same rule decide alike.
    pub fn derive(given: Option<IncomingContext>, drawn: (u128, u64), ratio: f64) -> Self {
        let span = SpanId::from_random(drawn.1);
        if let Some(IncomingContext { trace, parent, flags }) = given {
            return Self { trace, span, parent: Some(parent), flags: flags & (SAMPLED | RANDOM) };
        }
        let trace = TraceId::from_random(drawn.0);
        let flags = RANDOM | if is_within_ratio(trace, ratio) { SAMPLED } else { 0 };
        Self { trace, span, parent: None, flags }
    }

    /// Returns true if the request is recorded.
    pub const fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// Returns the flags for a collector.
    pub const fn flags(self) -> u8 {
        self.flags
    }

    /// Returns the `traceparent` for an outgoing request whose parent is `span`, in the same trace.
    pub fn traceparent(self, span: SpanId) -> String {
        format!("00-{}-{span}-{:02x}", self.trace, self.flags)
    }
}

/// Returns true for this share of all traces, by the low 56 bits of the id, as OpenTelemetry samples.
fn is_within_ratio(trace: TraceId, ratio: f64) -> bool {
    const ALL: u64 = 1 << 56;
    let low = u64::try_from(trace.0 & u128::from(ALL - 1)).unwrap_or_default();
    let share = crate::units::as_f64(ALL - low) / crate::units::as_f64(ALL);
    share <= ratio
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SOUND: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn parsed(text: &str) -> Option<IncomingContext> {
        IncomingContext::parse(text.as_bytes())
    }

    #[test]
    fn what_is_sound_is_taken_and_all_else_is_not() {
        let given = parsed(SOUND).unwrap();
        assert_eq!(given.trace.to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!((given.parent.to_string().as_str(), given.is_sampled()), ("b7ad6b7169203331", true));
        assert!(!parsed(&SOUND.replace("-01", "-00")).unwrap().is_sampled());
        // Unknown flags and later versions are parsed as far as they are known.
        assert!(parsed(&SOUND.replace("-01", "-ff")).unwrap().is_sampled());
        assert!(parsed(&SOUND.replacen("00", "cc", 1)).unwrap().is_sampled());
        assert!(parsed(&format!("{}-what-comes", SOUND.replacen("00", "cc", 1))).is_some());
        for bad in [
            String::new(),
            format!("{SOUND}-more"),
            format!("{SOUND} "),
            SOUND.replacen("00", "ff", 1),
            SOUND.replacen("00", "0", 1),
            SOUND.replacen("00", "0G", 1),
            SOUND.to_uppercase(),
            SOUND.replace("0af7651916cd43dd8448eb211c80319c", "00000000000000000000000000000000"),
            SOUND.replace("b7ad6b7169203331", "0000000000000000"),
            SOUND.replace("b7ad6b7169203331", "b7ad6b716920333"),
            SOUND.replace("-01", "-1"),
            SOUND.replace("-01", "-+1"),
            SOUND.replace("-01", ""),
            SOUND.replace('-', "."),
            format!("{}.x", SOUND.replacen("00", "cc", 1)),
        ] {
            assert_eq!(parsed(&bad), None, "{bad}");
        }
    }

    #[test]
    fn a_state_is_passed_on_whole_or_not_at_all() {
        let is_sound = |values: &[&str]| is_sound_state(values.iter().map(|value| value.as_bytes()));
        for sound in [
            &["rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"][..],
            &["a=1", "b=2"],
            &["", "a=1,,b=2, "],
            &["1t@v=x y"],
        ] {
            assert!(is_sound(sound), "{sound:?}");
        }
        let many = (0..33).map(|n| format!("k{n}=1")).collect::<Vec<_>>().join(",");
        let long = format!("a={}", "x".repeat(256));
        for bad in [
            &["a"][..],
            &["A=1"],
            &["a=1,a=2"],
            &["a=1", "a=2"],
            &["a=b=c"],
            &["a=\u{e9}"],
            &["1=1"],
            &["a="],
            &["t@=1"],
            &[&many],
            &[&long, &long.replace('a', "b")],
        ] {
            assert!(!is_sound(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_trace_goes_on_as_its_parent_decided_and_a_new_one_is_drawn() {
        let given = parsed(SOUND);
        let context = RequestTraceContext::derive(given, (1, 7), 0.0);
        assert!(context.is_sampled(), "the parent is");
        assert_eq!(context.parent, Some(SpanId(0xb7ad_6b71_6920_3331)));
        assert_eq!(
            context.traceparent(context.span),
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000007-01"
        );
        let not = RequestTraceContext::derive(parsed(&SOUND.replace("-01", "-00")), (1, 7), 1.0);
        assert!(!not.is_sampled() && not.traceparent(not.span).ends_with("-00"));
        let unknown = RequestTraceContext::derive(parsed(&SOUND.replace("-01", "-fd")), (1, 7), 0.0);
        assert!(unknown.traceparent(unknown.span).ends_with("-01"), "what is not known is not passed on");
        let own = RequestTraceContext::derive(None, (0, 0), 1.0);
        assert_eq!((own.trace, own.span, own.parent, own.is_sampled()), (TraceId(1), SpanId(1), None, true));
        assert!(!RequestTraceContext::derive(None, (u128::MAX, 1), 0.0).is_sampled());
    }

    proptest! {
        #[test]
        fn nothing_that_comes_can_break_it(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Some(given) = IncomingContext::parse(&bytes) {
                let context = RequestTraceContext::derive(Some(given), (1, 1), 1.0);
                prop_assert!(IncomingContext::parse(context.traceparent(context.span).as_bytes()).is_some());
            }
            is_sound_state([&bytes[..]]);
        }

        #[test]
        fn as_many_are_drawn_as_asked_for(ratio in 0.0..=1.0_f64, seed: u64) {
            let drawn = (0..2000_u32).filter(|n| {
                let low = SpanId(seed).child_id(*n).0;
                RequestTraceContext::derive(None, (u128::from(low), 1), ratio).is_sampled()
            });
            let share = f64::from(u32::try_from(drawn.count()).unwrap()) / 2000.0;
            prop_assert!((share - ratio).abs() < 0.06, "{share} of {ratio}");
        }

        #[test]
        fn parts_of_a_span_have_numbers_of_their_own(span: u64) {
            let mut all: Vec<u64> = (0..64).map(|n| SpanId(span).child_id(n).0).collect();
            all.sort_unstable();
            all.dedup();
            prop_assert_eq!(all.len(), 64);
        }
    }
}
