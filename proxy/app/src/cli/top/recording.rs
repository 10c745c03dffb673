//! A recording that is played: readings of one process become pictures, each with what the detector knew at its moment. Pure.

use std::time::Duration;

use warden_policies::growth::{Growth, GrowthPolicy, Monitor};
use warden_policies::sample::Sample;
use warden_policies::{MemoryKind, phrases};

use super::look::{BAD, PLAIN, QUIET};
use super::memory::{MemoryHistory, MemoryLine};
use super::picture::{EventLine, InstancePicture, ModelRow};
use super::rates::WorkRate;
use super::text::tame;
use crate::cli::growth;
use crate::cli::status::age;

/// How many times faster than it was recorded it can be played.
const SPEEDS: [u32; 10] = [1, 2, 5, 10, 30, 60, 120, 300, 600, 3600];
/// The first speed plays all of it in this time.
const WHOLE: Duration = Duration::from_secs(60);
/// Points of a line, and moments at which the verdict is kept besides those at which it changed.
const MOMENTS: usize = 2000;
/// Rates are means of the last seconds before the moment that is shown.
const WINDOW: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct PlayedRecording {
    name: String,
    /// In the order of time.
    samples: Vec<Sample>,
    /// Readings from point to point of a line.
    every: usize,
    /// What the detector knew from a reading on, and its rate of requests.
    verdicts: Vec<(usize, Vec<Growth>, Option<f64>)>,
    /// Times since the process was started: of the first and the last reading, and of what is shown.
    from: Duration,
    to: Duration,
    at: Duration,
    speed: usize,
    paused: bool,
}

impl PlayedRecording {
    /// The part of the whole that one key moves.
    pub(super) const SEEK: f64 = 0.05;

    /// Returns the recording, and the changes of verdicts in it as events.
    pub(super) fn open(name: &str, samples: Vec<Sample>, policy: &GrowthPolicy) -> (Self, Vec<EventLine>) {
        let mut monitor = Monitor::new(policy);
        let every = (samples.len() / MOMENTS).max(1);
        let (mut verdicts, mut events) = (Vec::new(), Vec::new());
        for (index, sample) in samples.iter().enumerate() {
            let changes = monitor.observe(sample);
            if !changes.is_empty() || index % every == 0 {
                verdicts.push((index, monitor.growth().to_vec(), monitor.rate()));
            }
            for change in changes {
                let (now, before) = (&change.growth, change.before.as_str());
                events.push(EventLine {
                    time: age(change.at),
                    at: change.at.as_secs_f64(),
                    model: Some(name.to_owned()),
                    text: tame(&format!("{}: {before} before, now {}", now.series, growth::of_growth(now))),
                    tone: if now.verdict.leaks() { BAD } else { PLAIN },
                    leaks: now.verdict.grows(),
                });
            }
        }
        let at = |sample: Option<&Sample>| sample.map(|sample| sample.at).unwrap_or_default();
        let (from, to) = (at(samples.first()), at(samples.last()));
        let length = to.saturating_sub(from);
        let speed = SPEEDS.iter().position(|speed| length / *speed <= WHOLE).unwrap_or(SPEEDS.len() - 1);
        let name = name.to_owned();
        (Self { name, samples, every, verdicts, from, to, at: from, speed, paused: false }, events)
    }

    /// Plays for so much time of the viewer.
    pub(super) fn advance(&mut self, passed: Duration) {
        if !self.paused {
            self.at = (self.at + passed * SPEEDS[self.speed]).min(self.to);
        }
    }

    /// Pauses or continues; at its end it begins again.
    pub(super) fn toggle_pause(&mut self) {
        self.paused = !self.paused && !self.is_over();
        if self.is_over() {
            self.at = self.from;
        }
    }

    pub(super) fn change_speed(&mut self, by: isize) {
        self.speed = self.speed.saturating_add_signed(by).min(SPEEDS.len() - 1);
    }

    /// Moves by a part of the whole, -1 to 1.
    pub(super) fn seek(&mut self, part: f64) {
        let by = self.to.saturating_sub(self.from).mul_f64(part.abs());
        let to = if part < 0.0 { self.at.saturating_sub(by) } else { self.at + by };
        self.at = to.min(self.to).max(self.from);
    }

    fn is_over(&self) -> bool {
        self.at >= self.to
    }

    /// The moment that is shown, in words: `4m10s of 12m00s, 10x, paused`.
    pub(super) fn words(&self) -> String {
        let state = match (self.is_over(), self.paused) {
            (true, _) => ", over",
            (false, true) => ", paused",
            (false, false) => "",
        };
        format!("{} of {}, {}x{state}", age(self.at), age(self.to), SPEEDS[self.speed])
    }

    /// Seconds since the process was started.
    pub(super) fn seconds(&self) -> f64 {
        self.at.as_secs_f64()
    }

    /// The readings up to this moment.
    fn played(&self) -> &[Sample] {
        &self.samples[..self.samples.partition_point(|sample| sample.at <= self.at)]
    }

    pub(super) fn picture(&self) -> InstancePicture {
        InstancePicture {
            facts: vec![format!("recording {}", tame(&self.name))],
            rows: self.played().last().map(|sample| self.row(sample)).into_iter().collect(),
            ..InstancePicture::default()
        }
    }

    /// The memories up to this moment, on an axis for all of it.
    pub(super) fn history(&self) -> MemoryHistory {
        let mut kinds: Vec<MemoryKind> = self.samples.iter().flat_map(kinds).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let thinned = || self.played().iter().rev().step_by(self.every).rev();
        let line = |kind: MemoryKind| {
            let point = |sample: &Sample| {
                Some((sample.at.as_secs_f64(), warden_policies::units::exact(sample.charged(kind)?)))
            };
            let points: Vec<(f64, f64)> = thinned().filter_map(point).collect();
            let held = self.played().last().and_then(|sample| sample.charged(kind));
            (!points.is_empty()).then_some(MemoryLine {
                kind,
                replica: 0,
                points,
                held,
                soft: None,
                hard: None,
            })
        };
        MemoryHistory {
            model: self.name.clone(),
            span: None,
            from: self.from.as_secs_f64(),
            to: self.to.as_secs_f64(),
            lines: kinds.into_iter().filter_map(line).collect(),
            marks: Vec::new(),
        }
    }

    fn row(&self, sample: &Sample) -> ModelRow {
        let index = self.played().len() - 1;
        let place = self.verdicts.partition_point(|(from, ..)| *from <= index).saturating_sub(1);
        let (growth, rate) = self.verdicts.get(place).map_or((&[][..], None), |(_, all, rate)| (all, *rate));
        let work = &sample.work;
        let mut words = vec![format!(
            "{} since its start: {} requests answered, {} prompt tokens, {} tokens generated, {} images",
            age(sample.at),
            work.requests,
            work.prompt_tokens,
            work.output_tokens,
            work.images
        )];
        words.extend(growth.iter().map(|one| format!("growth: {}", growth::of_growth(one))));
        let window = self.played().partition_point(|earlier| earlier.at + WINDOW < sample.at);
        let earlier = &self.samples[window.min(index)];
        let mut row = ModelRow {
            name: self.name.clone(),
            shown: tame(&self.name),
            state: ("recorded", PLAIN),
            processes: (1, 1),
            busy: (sample.in_flight, None),
            host: sample.charged(MemoryKind::Host),
            vram: sample.vram.iter().map(|vram| (vram.gpu.0, vram.bytes)).collect(),
            rate: WorkRate::from_work(*work - earlier.work, sample.at.saturating_sub(earlier.at)),
            words: words.iter().map(|line| tame(line)).collect(),
            work: vec![((0, None), *work)],
            ..ModelRow::default()
        };
        if let Some(worst) = row.set_growth(growth.iter().map(|one| (one, rate))) {
            row.next = (worst.blame.as_ref().map(phrases::blame).unwrap_or_default(), QUIET);
        }
        row
    }
}

fn kinds(sample: &Sample) -> impl Iterator<Item = MemoryKind> + '_ {
    let host = sample.host.map(|_| MemoryKind::Host);
    host.into_iter().chain(sample.vram.iter().map(|vram| MemoryKind::Vram(vram.gpu)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_policies::growth::Verdict;
    use warden_policies::trace;

    /// A process that gains 4 MiB with each request, one each second.
    fn leak(seconds: u64) -> Vec<Sample> {
        let line = |second: u64| {
            format!(
                "{{\"t\": {second}, \"edge\": \"idle\", \"requests\": {second}, \"images\": {second}, \"output_tokens\": {}, \
                 \"rss_anon_kib\": {}, \"vram_mib\": 900}}\n",
                second * 10,
                200_000 + second * 4096
            )
        };
        trace::parse(&(0..=seconds).map(line).collect::<String>()).unwrap()
    }

    fn recording(seconds: u64) -> (PlayedRecording, Vec<EventLine>) {
        PlayedRecording::open("a/b.jsonl", leak(seconds), &warden_policies::defaults().growth)
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
        assert_eq!(SPEEDS[film.speed], 3600);
    }

    #[test]
    fn each_moment_shows_what_was_known_then() {
        let (mut film, events) = recording(300);
        let row = film.picture().rows.remove(0);
        assert_eq!((row.verdict, row.slope), (Verdict::Warming, None));
        assert_eq!(row.host, Some(200_000 << 10));
        film.seek(1.0);
        let row = film.picture().rows.remove(0);
        assert_eq!(row.verdict, Verdict::Leaking);
        let slope = row.slope.unwrap();
        assert!((4.0e6..4.4e6).contains(&slope), "{slope}");
        let hourly = row.hourly.unwrap();
        assert!((hourly / slope / 3600.0 - 1.0).abs() < 0.1, "{hourly} {slope}");
        assert_eq!(row.rate, Some(WorkRate { requests: 1.0, tokens: 10.0 }));
        assert!(events.iter().any(|one| one.text.starts_with("host: ") && one.leaks), "{events:?}");
        let history = film.history();
        assert_eq!(history.lines.len(), 2);
        assert!(history.lines[0].points.len() > 100);
        film.seek(-0.5);
        assert!(film.history().lines[0].points.last().unwrap().0 <= 150.0);
    }
}
