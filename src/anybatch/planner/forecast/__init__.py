"""What more ranks would bring: step time and efficiency at any world size, from one rank's times and a network."""
