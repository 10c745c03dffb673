//! Tests of valid and invalid recordings.

use super::*;

const LINE: &str = r#"{"t": 0.385, "edge": "idle", "in_flight": 0, "requests": 1, "prompt_tokens": 300, "output_tokens": 64, "images": 1, "rss_anon_kib": 363876, "rss_kib": 606676, "swap_kib": 4, "vram_mib": 3090}"#;

fn one(text: &str) -> BackendSample {
    parse_recording(text).unwrap().remove(0)
}

#[test]
fn a_line_is_read_field_by_field() {
    let sample = one(LINE);
    assert_eq!(sample.at, Duration::from_millis(385));
    assert_eq!(sample.edge, SampleEdge::Idle);
    assert_eq!(sample.host.map(HostMemory::charged), Some((363_876 + 4) * KIB));
    assert_eq!(sample.charged(MemoryKind::Vram(GpuIndex(0))), Some(3090 * MIB));
    assert_eq!(
        sample.work,
        WorkDone { requests: 1, prompt_tokens: 300, output_tokens: 64, images: 1, audio: 0 }
    );
}

#[test]
fn what_is_missing_or_null_is_unknown_and_not_zero() {
    let sample = one(r#"{"t": 1, "requests": 3, "rss_anon_kib": null, "vram_mib": null, "vram1_mib": 7}"#);
    assert_eq!(sample.host, None);
    assert_eq!(sample.charged(MemoryKind::Vram(GpuIndex(0))), None);
    assert_eq!(sample.charged(MemoryKind::Vram(GpuIndex(1))), Some(7 * MIB));
    assert_eq!(sample.pooled(MemoryKind::Host), None);
    assert_eq!(sample.edge, SampleEdge::Tick);
}

#[test]
fn unknown_fields_and_empty_lines_are_passed_over() {
    let text = "\u{feff}\n{\"t\": 1, \"requests\": 1, \"weather\": [1, {}], \"vram_total_mib\": 5}\n\n";
    assert_eq!(parse_recording(text).unwrap().len(), 1);
}

#[test]
fn what_is_written_is_read_again() {
    let mut sample = one(LINE);
    sample.vram.push(VramReading { gpu: GpuIndex(3), bytes: 5 * MIB + 512, source: VramSource::Estimate });
    sample.pools = vec![(MemoryKind::Host, 12345)];
    sample.largest_prompt = 299;
    sample.work.audio = 2;
    assert_eq!(one(&format_line(&sample)), sample);
    let unknown = BackendSample { host: None, vram: vec![], pools: vec![], ..sample };
    assert_eq!(one(&format_line(&unknown)), unknown);
}

#[test]
fn errors_name_the_line_and_the_field() {
    let bad = [
        "nonsense",
        "[1]",
        r#"{"requests": 1}"#,
        r#"{"t": "soon", "requests": 1}"#,
        r#"{"t": -1, "requests": 1}"#,
        r#"{"t": 0.1, "requests": 1}"#,
        r#"{"t": 2}"#,
        r#"{"t": 2, "requests": -4}"#,
        r#"{"t": 2, "requests": 1, "edge": "sharp"}"#,
        r#"{"t": 2, "requests": 1, "rss_anon_kib": "much"}"#,
        r#"{"t": 2, "requests": 1, "rss_anon_kib": 18446744073709551615}"#,
        r#"{"t": 2, "requests": 1, "vram2_mib": true}"#,
        r#"{"t": 2, "requests": 1, "vram_mib": 1, "vram0_mib": 1}"#,
        r#"{"t": 2, "requests": 1, "pools": {"hots": 1}}"#,
    ];
    let told = bad.map(|bad| {
        let error = parse_recording(&format!("{LINE}\n{bad}\n")).unwrap_err();
        assert_eq!(error.line, 2, "{bad}: {error}");
        format!("{bad}\n    {error}\n")
    });
    insta::assert_snapshot!(told.concat());
}

#[test]
fn a_last_line_that_was_cut_short_is_no_error() {
    let whole = r#"{"t": 1, "requests": 1, "rss_anon_kib": 5}"#;
    for end in 1..whole.len() {
        let text = format!("{whole}\n{}", &whole[..end]);
        assert_eq!(parse_recording(&text).unwrap().len(), 1, "{text}");
    }
    assert!(parse_recording(&format!("{whole}\n{{\"t\"\n")).is_err(), "a whole line is meant as it is");
    assert!(parse_recording(&format!("{whole}\nx")).is_err());
    assert!(parse_recording("{\"t\"").is_err(), "nothing but a piece is no recording");
}
