//! Plays a recording: turns readings of one process into pictures with the detector's state at that time.
//! Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use warden_admin::growth_text;
use warden_policies::growth::{GrowthMonitor, GrowthPolicy};
use warden_policies::sample::BackendSample;
use warden_policies::units::{as_f64, truncate_to_u64};
use warden_policies::{MemoryKind, phrases};

use super::look::{BAD, PLAIN, QUIET, sanitize};
use super::picture::{EventLine, InstancePicture, ModelRow, RowGrowth, RowLoad, WorkRate};
use super::plot::{MemoryHistory, MemoryLine};
use crate::cli::status::short_age;

const PLAYBACK_SPEEDS: [u32; 10] = [1, 2, 5, 10, 30, 60, 120, 300, 600, 3600];
const DEFAULT_PLAY_TIME: Duration = Duration::from_secs(60);
/// Number of kept moments, in addition to those at which a verdict changed.
const MAX_KEPT_MOMENTS: usize = 2000;
/// Rates are averages over this time before the shown moment.
const RATE_WINDOW: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct PlayedRecording {
    name: String,
    /// Rows with the time from which they are valid, oldest first.
    rows: Vec<(Duration, ModelRow)>,
    /// Seconds and bytes, oldest first.
    lines: BTreeMap<MemoryKind, Vec<(f64, f64)>>,
    /// Times since the start of the process: first reading, last reading and shown moment.
    from: Duration,
    to: Duration,
    at: Duration,
    speed: usize,
    paused: bool,
}

impl PlayedRecording {
    /// Share of the recording that an arrow key skips.
    pub(super) const SEEK: f64 = 0.05;

    /// Also returns the changes of verdicts as events.
    pub(super) fn open(
        name: &str,
        samples: &[BackendSample],
        policy: &GrowthPolicy,
    ) -> (Self, Vec<EventLine>) {
        let mut monitor = GrowthMonitor::new(policy);
        let every = (samples.len() / MAX_KEPT_MOMENTS).max(1);
        let mut recording = Self { name: name.to_owned(), ..Self::default() };
        let mut events = Vec::new();
        for (index, sample) in samples.iter().enumerate() {
            let changes = monitor.observe(sample);
            if !changes.is_empty() || index % every == 0 || index + 1 == samples.len() {
                let window = samples[..index].partition_point(|earlier| earlier.at + RATE_WINDOW < sample.at);
                recording.rows.push((sample.at, row(name, sample, &samples[window], &monitor)));
                let host = sample.host.map(|_| MemoryKind::Host);
                let vram = sample.vram.iter().map(|vram| MemoryKind::Vram(vram.gpu));
                for kind in host.into_iter().chain(vram) {
                    let point = sample.charged(kind).map(|bytes| (sample.at.as_secs_f64(), as_f64(bytes)));
                    recording.lines.entry(kind).or_default().extend(point);
                }
            }
            for change in changes {
                let now = &change.growth;
                let before = change.before.as_str();
                events.push(EventLine {
                    time: short_age(change.at),
                    at: change.at.as_secs_f64(),
                    model: Some(name.to_owned()),
                    text: sanitize(&format!(
                        "{}: {before} before, now {}",
                        now.series,
                        growth_text::growth_line(now)
                    )),
                    tone: if now.verdict.leaks() { BAD } else { PLAIN },
                    leaks: now.verdict.grows(),
                });
            }
        }
        recording.from = samples.first().map(|sample| sample.at).unwrap_or_default();
        recording.to = samples.last().map(|sample| sample.at).unwrap_or_default();
        recording.at = recording.from;
        let length = recording.to.saturating_sub(recording.from);
        recording.speed = PLAYBACK_SPEEDS
            .iter()
            .position(|speed| length / *speed <= DEFAULT_PLAY_TIME)
            .unwrap_or(PLAYBACK_SPEEDS.len() - 1);
        (recording, events)
    }

    pub(super) fn advance(&mut self, passed: Duration) {
        if !self.paused {
            self.at = (self.at + passed * PLAYBACK_SPEEDS[self.speed]).min(self.to);
        }
    }

    /// Restarts a recording that has ended.
    pub(super) fn toggle_pause(&mut self) {
        self.paused = !self.paused && !self.is_over();
        if self.is_over() {
            self.at = self.from;
        }
    }

    pub(super) fn change_speed(&mut self, by: isize) {
        self.speed = self.speed.saturating_add_signed(by).min(PLAYBACK_SPEEDS.len() - 1);
    }

    /// `part`: share of the recording, -1 to 1.
    pub(super) fn seek(&mut self, part: f64) {
        let by = self.to.saturating_sub(self.from).mul_f64(part.abs());
        let to = if part < 0.0 { self.at.saturating_sub(by) } else { self.at + by };
        self.at = to.min(self.to).max(self.from);
    }

    fn is_over(&self) -> bool {
        self.at >= self.to
    }

    /// Returns a text such as `4m10s of 12m00s, 10x, paused`.
    pub(super) fn words(&self) -> String {
        let state = match (self.is_over(), self.paused) {
            (true, _) => ", over",
            (false, true) => ", paused",
            (false, false) => "",
        };
        format!("{} of {}, {}x{state}", short_age(self.at), short_age(self.to), PLAYBACK_SPEEDS[self.speed])
    }

    /// Returns the time since the start of the process.
    pub(super) fn seconds(&self) -> f64 {
        self.at.as_secs_f64()
    }

    pub(super) fn picture(&self) -> InstancePicture {
        let next = self.rows.partition_point(|(at, _)| *at <= self.at);
        InstancePicture {
            facts: vec![format!("recording {}", sanitize(&self.name))],
            rows: self.rows[..next].last().map(|(_, row)| row.clone()).into_iter().collect(),
            ..InstancePicture::default()
        }
    }

    /// Returns the readings up to the shown moment, on an axis for the whole recording.
    pub(super) fn history(&self) -> MemoryHistory {
        let line = |(kind, points): (&MemoryKind, &Vec<(f64, f64)>)| {
            let points = &points[..points.partition_point(|(at, _)| *at <= self.seconds())];
            let held = points.last().map(|(_, bytes)| truncate_to_u64(*bytes));
            let line =
                MemoryLine { kind: *kind, replica: 0, points: points.to_vec(), held, soft: None, hard: None };
            held.map(|_| line)
        };
        MemoryHistory {
            model: self.name.clone(),
            span: None,
            from: self.from.as_secs_f64(),
            to: self.to.as_secs_f64(),
            lines: self.lines.iter().filter_map(line).collect(),
            marks: Vec::new(),
        }
    }
}

fn row(name: &str, sample: &BackendSample, earlier: &BackendSample, monitor: &GrowthMonitor) -> ModelRow {
    let work = &sample.work;
    let mut words = vec![format!(
        "{} since its start: {} requests answered, {} prompt tokens, {} tokens generated, {} images",
        short_age(sample.at),
        work.requests,
        work.prompt_tokens,
        work.output_tokens,
        work.images
    )];
    words.extend(monitor.growth().iter().map(|one| format!("growth: {}", growth_text::growth_line(one))));
    let rate = WorkRate::from_work(*work - earlier.work, sample.at.saturating_sub(earlier.at));
    let mut growth = RowGrowth::default();
    let worst = growth.take_worst(monitor.growth().iter().map(|one| (one, monitor.rate())));
    let next =
        worst.map(|worst| (worst.blame.as_ref().map(phrases::blame_phrase).unwrap_or_default(), QUIET));
    ModelRow {
        name: name.to_owned(),
        shown: sanitize(name),
        state: ("recorded", PLAIN),
        load: RowLoad { processes: (1, 1), busy: (sample.in_flight, None), waiting: 0, rate },
        host: sample.charged(MemoryKind::Host),
        vram: sample.vram.iter().map(|vram| (vram.gpu.0, vram.bytes)).collect(),
        growth,
        next: next.unwrap_or_default(),
        words: words.iter().map(|line| sanitize(line)).collect(),
        ..ModelRow::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_policies::growth::GrowthVerdict;
    use warden_policies::trace;

    /// A process that gains 4 MiB with each request, one each second.
    fn leak(seconds: u64) -> Vec<BackendSample> {
        let line = |second: u64| {
            format!(
                "{{\"t\": {second}, \"edge\": \"idle\", \"requests\": {second}, \"images\": {second}, \"output_tokens\": {}, \
                 \"rss_anon_kib\": {}, \"vram_mib\": 900}}\n",
                second * 10,
                200_000 + second * 4096
            )
        };
        trace::parse_recording(&(0..=seconds).map(line).collect::<String>()).unwrap()
    }

    fn recording(seconds: u64) -> (PlayedRecording, Vec<EventLine>) {
        PlayedRecording::open("a/b.jsonl", &leak(seconds), &warden_policies::defaults().growth)
    }

    #[test]
    fn it_plays_pauses_goes_faster_and_stops_at_its_end() {
        let (mut film, _) = recording(120);
        assert_eq!(film.words(), "0s of 2m00s, 2x");
        film.advance(Duration::from_secs(10));
        film.change_speed(1);
        film.advance(Duration::from_secs(2));
        assert_eq!(film.words(), "30s of 2m00s, 5x");
        film.toggle_pause();
        film.advance(Duration::from_secs(99));
        assert_eq!(film.words(), "30s of 2m00s, 5x, paused");
        film.seek(PlayedRecording::SEEK);
        film.change_speed(-1);
        assert_eq!(film.words(), "36s of 2m00s, 2x, paused");
        film.seek(-1.0);
        film.toggle_pause();
        film.advance(Duration::from_secs(1000));
        assert_eq!(film.words(), "2m00s of 2m00s, 2x, over");
        film.toggle_pause();
        assert_eq!(film.words(), "0s of 2m00s, 2x");
        (0..20).for_each(|_| film.change_speed(1));
        assert_eq!(PLAYBACK_SPEEDS[film.speed], 3600);
    }

    #[test]
    fn each_moment_shows_what_was_known_then() {
        let (mut film, events) = recording(300);
        let row = film.picture().rows.remove(0);
        assert_eq!((row.growth.verdict, row.growth.slope), (GrowthVerdict::Warming, None));
        assert_eq!(row.host, Some(200_000 << 10));
        film.seek(1.0);
        let row = film.picture().rows.remove(0);
        assert_eq!(row.growth.verdict, GrowthVerdict::Leaking);
        let slope = row.growth.slope.unwrap();
        assert!((4.0e6..4.4e6).contains(&slope), "{slope}");
        let hourly = row.growth.hourly.unwrap();
        assert!((hourly / slope / 3600.0 - 1.0).abs() < 0.1, "{hourly} {slope}");
        assert_eq!(row.load.rate, Some(WorkRate { requests: 1.0, tokens: 10.0 }));
        assert!(events.iter().any(|one| one.text.starts_with("host: ") && one.leaks), "{events:?}");
        let history = film.history();
        assert_eq!(history.lines.len(), 2);
        assert!(history.lines[0].points.len() > 100);
        film.seek(-0.5);
        assert!(film.history().lines[0].points.last().unwrap().0 <= 150.0);
    }
}
