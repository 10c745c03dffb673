//! Snapshots of the sentences about decisions, verdicts and invalid values.

use std::fmt::Display;

use crate::admission::AdmitDecision;
use crate::cooldown::{HoldReason, PauseRule};
use crate::growth::WorkUnit;
use crate::health::{GpuOffload, HealthSymptom, LimitBasis, OffloadLoss, SilenceLimit};
use crate::lifecycle::BackendPhase;
use crate::recycle::RecycleHindrance;
use crate::replacement_cost::ReplacementCosts;
use crate::schedule::DayWindows;
use crate::{AllowedOrigins, GpuIndex, HostNames, MemoryLimit, RateLimit, RecycleAction};

use super::*;

const GIB: u64 = 1 << 30;
const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(1));

fn mib(value: f64, low: f64, high: f64) -> IntervalEstimate {
    let mib = as_f64(MIB);
    IntervalEstimate { value: value * mib, low: low * mib, high: high * mib }
}

fn lines<T: Display>(said: impl IntoIterator<Item = T>) -> String {
    said.into_iter().map(|one| one.to_string() + "\n").collect()
}

#[test]
fn growth_reads_as_a_sentence_with_its_interval() {
    let open = IntervalEstimate { high: f64::MAX, ..mib(4.42, 4.4, 0.0) };
    let slopes = [
        mib(4.42, 4.4, 4.45),
        mib(-0.02, -0.5, 0.0),
        mib(-1e-9, -1e-9, 1e-9),
        mib(0.002, 0.0, 0.1),
        mib(0.0, 0.0, 0.0),
        open,
    ];
    let pays = |unit, mib, share| GrowthBlame::Pays { unit, bytes_per_unit: mib * as_f64(MIB), share };
    let blames = [
        pays(WorkUnit::Request, 1.0, 1.0),
        pays(WorkUnit::PromptToken, 0.001, 0.5),
        pays(WorkUnit::OutputToken, 0.001, 0.5),
        pays(WorkUnit::Image, 4.42, 0.976),
        pays(WorkUnit::Audio, 2.0, 0.8),
        pays(WorkUnit::Hour, 300.0, 0.99),
        GrowthBlame::Undecided { why: "every request has one image.".to_owned() },
    ];
    let fills = [(0, 0), (2, 1), (2, 3)]
        .map(|(allowed, used)| AllowanceFill { allowed: allowed * GIB, used: used * GIB });
    let said = slopes
        .iter()
        .map(slope_phrase)
        .chain(blames.iter().map(blame_phrase))
        .chain(fills.iter().filter_map(fill_phrase));
    insta::assert_snapshot!(lines(said));
}

#[test]
fn a_forecast_has_requests_and_where_a_rate_is_known_a_time() {
    let requests = IntervalEstimate { value: 120.4, low: 100.0, high: f64::MAX };
    let bare = GrowthForecast { limit: 1, requests, seconds: None };
    let at =
        |value, low, high| GrowthForecast { seconds: Some(IntervalEstimate { value, low, high }), ..bare };
    let forecasts = [bare, at(2100.0, 61.0, f64::MAX), at(59.9, 0.1, 7200.0), at(90_061.0, 0.0, 400e6)];
    insta::assert_snapshot!(lines(forecasts.iter().map(forecast_phrase)));
}

#[test]
fn a_decision_names_what_is_done_why_and_at_which_limit() {
    let of = |reason: &Reason| {
        let series = match reason {
            Reason::HostSoft | Reason::HostHard | Reason::Growth => Some(MemoryKind::Host),
            Reason::VramSoft | Reason::VramHard | Reason::DeviceFault => Some(VRAM),
            _ => None,
        };
        let limit_bytes = series.map(|_| 2 * GIB);
        let action = RecycleAction::RecycleWhenQuiet;
        decision_phrase(&RecycleDecision {
            action,
            reason: Some(*reason),
            series,
            limit_bytes,
            ..RecycleDecision::OBSERVE
        })
        .unwrap()
    };
    assert_eq!(decision_phrase(&RecycleDecision::OBSERVE), None);
    let actions = [
        RecycleAction::Observe,
        RecycleAction::RecycleWhenQuiet,
        RecycleAction::DrainNow,
        RecycleAction::KillNow,
    ];
    insta::assert_snapshot!(lines(
        actions.map(|action| action.phrase().to_owned()).into_iter().chain(Reason::ALL.iter().map(of))
    ));
}

#[test]
fn what_holds_a_replacement_back_is_said_with_the_way_out() {
    let helds = [
        HoldReason::TooSoon { seconds_left: 90, rule: PauseRule::MinInterval },
        HoldReason::TooSoon { seconds_left: 90, rule: PauseRule::MinIntervalHard },
        HoldReason::TooSoon { seconds_left: 90, rule: PauseRule::LoadTime },
        HoldReason::LongRequests { seconds_left: 300 },
        HoldReason::Futile { recycles: 3, series: None },
        HoldReason::Futile { recycles: 3, series: Some(VRAM) },
        HoldReason::GrowthGoesOn { recycles: 4, seconds: 21_600 },
        HoldReason::AnswersStayFaulty,
        HoldReason::DriverLeak { series: MemoryKind::Host, bytes: GIB },
        HoldReason::DriverLeak { series: VRAM, bytes: GIB },
        HoldReason::CannotStart,
    ];
    let reasons = [
        RecycleHindrance::NotQuiet { seconds_left: 59 },
        RecycleHindrance::OutsideWindow { minutes_left: 85 },
        RecycleHindrance::Observing { would: RecycleAction::DrainNow },
        RecycleHindrance::Observing { would: RecycleAction::RecycleWhenQuiet },
        RecycleHindrance::NotYet { seconds_to_limit: 46_800, seconds_before: 3600 },
        RecycleHindrance::NotConfirmed,
        RecycleHindrance::InTurn,
        RecycleHindrance::Reclaiming,
        RecycleHindrance::Reclaimed { seconds: 12, bytes: 1 << 30 },
    ];
    let held = helds.map(|by| RecycleHindrance::Held { by });
    let weighing =
        ReplacementCosts { now: true, cost_now: 12.0, cost_lull: 4.0, cost_end: 600.0, risk: 0.951 };
    let weighings = [weighing, ReplacementCosts { now: false, risk: 0.0, ..weighing }];
    let said = reasons.iter().chain(&held).map(ToString::to_string);
    insta::assert_snapshot!(lines(said.chain(weighings.iter().map(ToString::to_string))));
}

#[test]
fn illness_and_admission_are_told_with_what_was_measured() {
    let of = |basis| SilenceLimit { seconds: 95.0, basis };
    let prompt = |media| LimitBasis::Prompt { tokens: 2048, token_ms: 3.5, media };
    let bases = [
        LimitBasis::Tokens { usual_ms: 42.4 },
        LimitBasis::Silent { token_ms: 20.0, tokens: 64 },
        prompt(0),
        prompt(2),
        LimitBasis::Unmeasured,
        LimitBasis::Unmoved,
        LimitBasis::Unseen,
    ];
    let wedged = bases.map(|basis| HealthSymptom::Wedged { seconds: 100, limit: of(basis) });
    let others = [
        HealthSymptom::ComputeErrors { in_a_row: 5 },
        HealthSymptom::SlowDecode { now: 12.34, baseline: 40.0 },
        HealthSymptom::DeviceFault { gpu: GpuIndex(1), xid: 79 },
    ];
    let had = |layers, of, vram| GpuOffload { layers, of, vram };
    let lost = [
        OffloadLoss { now: had(Some(0), Some(33), Some(0)), known: had(Some(33), Some(33), Some(8 * GIB)) },
        OffloadLoss { now: had(None, None, None), known: had(Some(33), None, None) },
    ];
    let refuse =
        |series, retry_after| AdmitDecision::Refuse { series, needed: 2 * GIB, have: GIB, retry_after };
    let admissions = [
        AdmitDecision::Fits,
        AdmitDecision::Wait { series: MemoryKind::Host },
        AdmitDecision::RecycleFirst { replica: 1, series: VRAM },
        AdmitDecision::Elsewhere { replica: 2 },
        refuse(VRAM, None),
        refuse(MemoryKind::Host, Some(Duration::from_secs(5))),
    ];
    let ill = wedged.iter().chain(&others).map(ToString::to_string);
    let rest = lost.iter().map(ToString::to_string).chain(admissions.iter().map(ToString::to_string));
    insta::assert_snapshot!(lines(ill.chain(rest)));
}

#[test]
fn every_name_of_a_state_is_a_word_for_people() {
    let phases = [
        BackendPhase::Idle,
        BackendPhase::Starting,
        BackendPhase::Ready,
        BackendPhase::Suspect,
        BackendPhase::Draining,
        BackendPhase::Stopping,
        BackendPhase::Backoff,
        BackendPhase::Failed,
    ];
    insta::assert_snapshot!(lines(phases.iter().map(ToString::to_string)));
}

#[test]
fn a_value_that_cannot_be_read_is_repeated_with_the_right_form() {
    let errors = [
        "12 GB of ram".parse::<ByteSize>().unwrap_err().to_string(),
        "0%".parse::<MemoryLimit>().unwrap_err().to_string(),
        serde_json::from_str::<ByteSize>("-1").unwrap_err().to_string(),
        serde_json::from_str::<ByteSize>("true").unwrap_err().to_string(),
        serde_json::from_str::<MemoryLimit>("true").unwrap_err().to_string(),
        crate::defaults::parse_duration("soon").unwrap_err().to_string(),
        "0/min".parse::<RateLimit>().unwrap_err().to_string(),
        "02:00".parse::<DayWindows>().unwrap_err().to_string(),
        "25:00-02:00".parse::<DayWindows>().unwrap_err().to_string(),
        "02:00-99:00".parse::<DayWindows>().unwrap_err().to_string(),
        "02:00-02:00".parse::<DayWindows>().unwrap_err().to_string(),
        "vram".parse::<MemoryKind>().unwrap_err().to_string(),
        HostNames::parse(&["http://llm.example"]).unwrap_err().to_string(),
        AllowedOrigins::parse(&["app.example/path"]).unwrap_err().to_string(),
    ];
    insta::assert_snapshot!(lines(errors));
}

#[test]
fn each_verdict_has_a_sentence_of_its_own() {
    let mut all = GrowthVerdict::ALL.map(verdict_phrase);
    all.sort_unstable();
    assert!(all.windows(2).all(|two| two[0] != two[1]));
    assert!(all.iter().all(|text| text.ends_with('.') && text.len() < 130));
}
