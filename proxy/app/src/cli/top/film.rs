//! A recording that is played: readings of one process become pictures, at any moment of it, as the detector saw them. Pure.

use std::sync::Arc;
use std::time::Duration;

use warden_policies::growth::{Blame, Growth, GrowthPolicy, Monitor, Unit, Verdict};
use warden_policies::sample::Sample;
use warden_policies::{MemoryKind, phrases};

use super::history::{Key, Line, Point};
use super::input::Told;
use super::look::Tone;
use super::picture::{Done, Memory, Picture, Row, Who};
use super::rates::Rate;
use super::text::tame;
use crate::cli::growth;
use crate::cli::status::age;

/// How many times faster than it was it can be played.
const SPEEDS: [u32; 10] = [1, 2, 5, 10, 30, 60, 120, 300, 600, 3600];
/// It begins with the speed at which it is over in this time.
const WHOLE: Duration = Duration::from_secs(60);
/// What the detector said is kept at so many moments, beside those at which it changed its mind.
const MOMENTS: usize = 2000;
/// Rates are those of the last seconds before the moment that is shown.
const WINDOW: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub(super) struct Film {
    tape: Arc<Tape>,
    /// Time of the readings, as they have it.
    at: Duration,
    speed: usize,
    paused: bool,
}

/// All that does not change while it is played.
#[derive(Debug)]
struct Tape {
    name: String,
    samples: Vec<Sample>,
    lines: Vec<(Key, Line)>,
    /// What the detector said, from this reading on.
    said: Vec<(usize, Vec<Growth>, Option<f64>)>,
}

impl Film {
    /// The part of the whole that one key goes.
    pub(super) const SEEK: f64 = 0.05;

    /// A film of readings in the order of time, and what the detector came to think, as events of it.
    pub(super) fn new(name: &str, samples: Vec<Sample>, policy: &GrowthPolicy) -> (Self, Vec<Told>) {
        let mut monitor = Monitor::new(policy);
        let every = (samples.len() / MOMENTS).max(1);
        let (mut said, mut told) = (Vec::new(), Vec::new());
        for (index, sample) in samples.iter().enumerate() {
            let changes = monitor.observe(sample);
            if !changes.is_empty() || index % every == 0 {
                said.push((index, monitor.growth().to_vec(), monitor.rate()));
            }
            told.extend(changes.iter().map(|change| {
                let now = &change.growth;
                let tone = if now.verdict.leaks() { Tone::Bad } else { Tone::Plain };
                Told {
                    time: age(change.at),
                    at: change.at.as_secs_f64(),
                    model: Some(name.to_owned()),
                    text: tame(&format!(
                        "{}: {} before, now {}",
                        now.series,
                        change.before.as_str(),
                        growth::of_growth(now)
                    )),
                    mark: now.verdict.grows().then_some(('v', tone)),
                }
            }));
        }
        let length = samples.last().map(|last| last.at).unwrap_or_default();
        let first = samples.first().map(|first| first.at).unwrap_or_default();
        let fits = |speed: &u32| length.saturating_sub(first) / *speed <= WHOLE;
        let tape = Tape { name: name.to_owned(), lines: lines(&samples), samples, said };
        let speed = SPEEDS.iter().position(fits).unwrap_or(SPEEDS.len() - 1);
        (Self { tape: Arc::new(tape), at: first, speed, paused: false }, told)
    }

    fn ends(&self) -> (Duration, Duration) {
        let of = |sample: Option<&Sample>| sample.map(|sample| sample.at).unwrap_or_default();
        (of(self.tape.samples.first()), of(self.tape.samples.last()))
    }

    /// Goes on by so much time of the viewer.
    pub(super) fn pass(&mut self, passed: Duration) {
        if !self.paused {
            self.at = (self.at + passed * SPEEDS[self.speed]).min(self.ends().1);
        }
    }

    /// Stops, or goes on; from its beginning if it is over.
    pub(super) fn pause(&mut self) {
        if self.is_over() {
            self.at = self.ends().0;
            self.paused = false;
        } else {
            self.paused = !self.paused;
        }
    }

    pub(super) fn faster(&mut self) {
        self.speed = (self.speed + 1).min(SPEEDS.len() - 1);
    }

    pub(super) fn slower(&mut self) {
        self.speed = self.speed.saturating_sub(1);
    }

    /// Goes on or back by a part of the whole, -1 to 1.
    pub(super) fn seek(&mut self, part: f64) {
        let (first, last) = self.ends();
        let by = last.saturating_sub(first).mul_f64(part.abs().min(1.0));
        self.at = if part < 0.0 { self.at.saturating_sub(by).max(first) } else { (self.at + by).min(last) };
    }

    pub(super) fn is_over(&self) -> bool {
        self.at >= self.ends().1
    }

    /// Where it is, in words: `4m10s of 12m, 10x, paused`.
    pub(super) fn words(&self) -> String {
        let state = match (self.is_over(), self.paused) {
            (true, _) => ", over",
            (false, true) => ", paused",
            (false, false) => "",
        };
        let (at, end) = (age(self.at), age(self.ends().1));
        format!("{at} of {end}, {}x{state}", SPEEDS[self.speed])
    }

    pub(super) fn at(&self) -> Duration {
        self.at
    }

    /// From its first to its last reading, in seconds.
    pub(super) fn range(&self) -> (f64, f64) {
        let (first, last) = self.ends();
        (first.as_secs_f64(), last.as_secs_f64())
    }

    pub(super) fn keys(&self) -> Vec<Key> {
        self.tape.lines.iter().map(|(key, _)| *key).collect()
    }

    /// The points up to now.
    pub(super) fn points(&self, key: Key) -> &[Point] {
        let line = self.tape.lines.iter().find(|(own, _)| *own == key);
        let points = line.map(|(_, line)| line.points()).unwrap_or_default();
        &points[..points.partition_point(|point| point.at <= self.at)]
    }

    pub(super) fn picture(&self) -> Picture {
        let tape = &*self.tape;
        let index = tape.samples.partition_point(|sample| sample.at <= self.at).saturating_sub(1);
        let rows = tape.samples.get(index).map(|sample| tape.row(index, sample)).into_iter().collect();
        let who = Who { name: format!("recording {}", tame(&tape.name)), ..Who::default() };
        Picture { who, rows, ..Picture::default() }
    }
}

/// The memories that were read, thinned out as those of an instance are.
fn lines(samples: &[Sample]) -> Vec<(Key, Line)> {
    let mut kinds: Vec<MemoryKind> = samples.iter().flat_map(kinds).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let of = |kind: MemoryKind| {
        let points =
            samples.iter().filter_map(|sample| Some(Point { at: sample.at, bytes: sample.charged(kind)? }));
        (Key { replica: 0, kind }, Line::of(points))
    };
    kinds.into_iter().map(of).collect()
}

fn kinds(sample: &Sample) -> impl Iterator<Item = MemoryKind> + '_ {
    let host = sample.host.map(|_| MemoryKind::Host);
    host.into_iter().chain(sample.vram.iter().map(|vram| MemoryKind::Vram(vram.gpu)))
}

impl Tape {
    fn row(&self, index: usize, sample: &Sample) -> Row {
        let place = self.said.partition_point(|(from, ..)| *from <= index).saturating_sub(1);
        let (growth, rate) = self.said.get(place).map_or((&[][..], None), |(_, all, rate)| (all, *rate));
        let worst = growth.iter().reduce(|worst, one| if one.verdict > worst.verdict { one } else { worst });
        let loud = worst.filter(|growth| growth.verdict >= Verdict::Bounded);
        let memory = |kind| {
            let bytes = sample.charged(kind)?;
            Some(Memory { kind, replica: 0, generation: None, bytes, soft: None, hard: None })
        };
        let work = &sample.work;
        let mut words = vec![format!(
            "{} since it was made: {} requests answered, {} prompt tokens, {} tokens generated, {} images",
            age(sample.at),
            work.requests,
            work.prompt_tokens,
            work.output_tokens,
            work.images
        )];
        words.extend(growth.iter().map(|one| format!("growth: {}", growth::of_growth(one))));
        Row {
            name: self.name.clone(),
            shown: tame(&self.name),
            state: ("recorded", Tone::Plain),
            processes: (1, 1),
            busy: (sample.in_flight, None),
            host: sample.charged(MemoryKind::Host),
            vram: sample.vram.iter().map(|vram| (vram.gpu.0, vram.bytes)).collect(),
            rate: self.rate(index),
            verdict: worst.map(|growth| growth.verdict).unwrap_or_default(),
            slope: loud.and_then(|growth| growth.slope).map(|slope| slope.value),
            hourly: loud.and_then(|growth| hourly(growth, rate)),
            next: (
                loud.and_then(|growth| growth.blame.as_ref()).map(phrases::blame).unwrap_or_default(),
                Tone::Quiet,
            ),
            words: words.iter().map(|line| tame(line)).collect(),
            memories: kinds(sample).filter_map(memory).collect(),
            work: vec![Done::of(0, None, *work)],
            ..Row::default()
        }
    }

    fn rate(&self, index: usize) -> Option<Rate> {
        let now = self.samples.get(index)?;
        let from = self.samples.partition_point(|sample| sample.at + WINDOW < now.at).min(index);
        let then = self.samples.get(from)?;
        let seconds = now.at.saturating_sub(then.at).as_secs_f64();
        let done = now.work - then.work;
        let each = |count: u64| warden_policies::units::exact(count) / seconds;
        (seconds > 0.0).then(|| Rate { requests: each(done.requests), tokens: each(done.output_tokens) })
    }
}

/// Bytes per hour at the rate of requests that the detector saw.
fn hourly(growth: &Growth, each_second: Option<f64>) -> Option<f64> {
    match &growth.blame {
        Some(Blame::Pays { unit: Unit::Hour, bytes_per_unit, .. }) => Some(*bytes_per_unit),
        _ => Some(growth.slope?.value * each_second? * 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

    fn film(seconds: u64) -> (Film, Vec<Told>) {
        Film::new("a/b.jsonl", leak(seconds), &warden_policies::defaults().growth)
    }

    #[test]
    fn it_plays_pauses_goes_faster_and_stops_at_its_end() {
        let (mut film, _) = film(120);
        assert_eq!(film.words(), "0s of 2m00s, 2x");
        film.pass(Duration::from_secs(10));
        film.faster();
        film.pass(Duration::from_secs(2));
        assert_eq!(film.words(), "30s of 2m00s, 5x");
        film.pause();
        film.pass(Duration::from_secs(99));
        assert_eq!(film.words(), "30s of 2m00s, 5x, paused");
        film.seek(Film::SEEK);
        film.slower();
        assert_eq!(film.words(), "36s of 2m00s, 2x, paused");
        film.seek(-1.0);
        film.pause();
        film.pass(Duration::from_secs(1000));
        assert_eq!(film.words(), "2m00s of 2m00s, 2x, over");
        film.pause();
        assert_eq!(film.words(), "0s of 2m00s, 2x");
        (0..20).for_each(|_| film.faster());
        assert_eq!(SPEEDS[film.speed], 3600);
    }

    #[test]
    fn each_moment_shows_what_was_known_then() {
        let (mut film, told) = film(300);
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
        assert_eq!(row.rate, Some(Rate { requests: 1.0, tokens: 10.0 }));
        assert!(told.iter().any(|one| one.text.starts_with("host: ") && one.mark.is_some()), "{told:?}");
        assert_eq!(film.keys().len(), 2);
        assert!(film.points(film.keys()[0]).len() > 100);
        film.seek(-0.5);
        assert!(film.points(film.keys()[0]).last().unwrap().at <= Duration::from_secs(150));
    }
}
